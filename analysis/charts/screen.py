"""Charts for the screen: a `Chart` as a Bokeh figure with zoom, tooltips and updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from bokeh.core.properties import value
from bokeh.core.serialization import Serializer
from bokeh.models.annotations import Legend, LegendItem, Slope, Title
from bokeh.models.axes import Axis as BokehAxis
from bokeh.models.axes import LinearAxis
from bokeh.models.callbacks import CustomJS
from bokeh.models.filters import BooleanFilter
from bokeh.models.formatters import BasicTickFormatter
from bokeh.models.labeling import NoOverlap
from bokeh.models.ranges import DataRange1d, Range, Range1d
from bokeh.models.renderers import GlyphRenderer
from bokeh.models.sources import CDSView, ColumnDataSource
from bokeh.models.tickers import FixedTicker
from bokeh.models.tools import HoverTool
from bokeh.plotting import figure
from bokeh.transform import linear_cmap

from analysis.charts import chart
from analysis.charts.chart import INKS, PALETTE, Axis, Chart, Column, Ink, Layer, Theme, band_of

_MAX_CHANGED_SHARE = 0.25
"""Share of changed rows above which it is cheaper to send all."""

Rows = npt.NDArray[np.int64]


def exchange(source: ColumnDataSource, data: Mapping[str, Any], *, ordered: bool) -> None:
    """With `ordered`, rows keep the order of `data`. Otherwise a new row may take the place of a removed
    one, so that a window over the newest rows can move without sending all."""
    held: dict[str, Any] = dict(source.data)
    if _same(held, data):
        return
    old, new = _hashes(held), _hashes(data)
    places, rows, more = (_in_order if ordered else _in_any_order)(old, new)
    gone = len(old) + len(more) - len(new)
    if not len(old) or gone > 0 or len(rows) + len(more) > _MAX_CHANGED_SHARE * len(new):
        source.data = dict(data)
        return
    if len(rows):
        source.patch({name: [*zip(places.tolist(), _select(column, rows), strict=True)]
                      for name, column in data.items()})  # fmt: skip
    if len(more):
        source.stream({name: _select(column, more) for name, column in data.items()})


def _in_order(old: Rows, new: Rows) -> tuple[Rows, Rows, Rows]:
    """Indices of the old rows to replace, of the new rows in their place, and of the new rows to
    append."""
    shared = min(len(old), len(new))
    changed = np.flatnonzero(old[:shared] != new[:shared])
    return changed, changed, np.arange(shared, len(new))


def _in_any_order(old: Rows, new: Rows) -> tuple[Rows, Rows, Rows]:
    places, rows = np.flatnonzero(~np.isin(old, new)), np.flatnonzero(~np.isin(new, old))
    shared = min(len(places), len(rows))
    return places[:shared], rows[:shared], rows[shared:]


def _same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """The usual case, and much cheaper to find than by hashing."""
    return len(old) == len(new) and all(
        old[name] == column
        if isinstance(column, list)
        else np.array_equal(old[name], column, equal_nan=column.dtype.kind == "f")
        for name, column in new.items()
        if name in old
    )


def _hashes(data: Mapping[str, Any]) -> Rows:
    if not data:
        return np.zeros(0, np.uint64)
    # Sorted by name, because the columns of a source may have another order.
    table = pd.DataFrame({name: np.asarray(data[name]) for name in sorted(data)})
    return np.asarray(pd.util.hash_pandas_object(table, index=False))


def _select(column: Any, rows: Rows) -> Any:
    return np.asarray(column)[rows].tolist()


# Charts for the screen: a `Chart` as a Bokeh figure with zoom, tooltips and updates.
#
# Every layer has its own data source. `ScreenChart.update` replaces the columns of all sources in place.
# `ScreenChart.sources[layer.name].stream(...)` adds rows to one source.

_HEIGHT = 240
"""Usual height of the plot in pixels, without title, axis and legend."""
WRAP = 80
"""Characters per line of a note, in a figure of the usual width."""
_TITLE, _LEGEND = 0.7, 1.2
"""Characters per line of a title and of a legend, relative to a line of a note."""
_TIME_SHARES = Path(__file__).with_name("time_shares.js").read_text(encoding="utf-8")
_TOOLS = "pan,xwheel_zoom,wheel_zoom,box_zoom,reset,save"


class _Texts(list[str]):
    """Bokeh would encode each string in turn, which takes a second for the states of 40,000 updates."""


Serializer.register(_Texts, lambda texts, _: list(texts))


@dataclass(slots=True)
class ScreenChart:
    figure: figure
    sources: dict[str, ColumnDataSource]
    _chart: Chart
    _ink: Ink
    _note: Title
    _labels: LinearAxis
    """Above the plot, with a tick for each label of a vertical line."""
    _wrap: int
    """Characters per line of a note."""
    _longest: int = 0
    """Characters of the longest name in the legend."""
    _time_shares: list[CustomJS] = field(default_factory=list)
    """Scripts that draw lanes as shares of time if their spans are too short to see."""
    _meanings: dict[str, LegendItem] = field(default_factory=dict)
    """Legend items that explain colours, by meaning. They include items that are no longer shown."""

    def update(self, chart: Chart) -> None:
        """A newer state of the same chart, in the same figure. Zoom and selections remain, new layers
        are added, those that `chart` lacks become empty."""
        for layer in chart.layers:
            if layer.name in self.sources:
                ordered = layer.mark in ("line", "step", "band")
                exchange(self.sources[layer.name], _data(layer), ordered=ordered)
                self._label(layer)
            elif layer.mark != "diagonal":
                self._add(layer)
        for name in self.sources.keys() - {layer.name for layer in chart.layers}:
            data: dict[str, Any] = dict(self.sources[name].data)
            self.sources[name].data = {column: rows[:0] for column, rows in data.items()}
        self._explain(chart.legend)
        self._note.text = _note(chart, self._wrap)
        for drawn, bokeh_range, old, new in (
            (_x_axis(self.figure), self.figure.x_range, self._chart.x, chart.x),
            (self.figure.yaxis[0], self.figure.y_range, self._chart.y, chart.y),
        ):
            if old.ticks != new.ticks:
                _set_ticks(drawn, new)
            if old.limits != new.limits:
                _set_limits(bokeh_range, new)
        self._chart = chart

    def share_x_range(self, other: ScreenChart) -> None:
        """Both zoom together."""
        self.figure.x_range = other.figure.x_range
        for script in self._time_shares:
            _follow_range(self.figure, script)

    def _add(self, layer: Layer) -> None:
        if layer.mark == "diagonal":
            dash = "dashed" if layer.dashed else "solid"
            slope = Slope(gradient=1, y_intercept=0, line_color=PALETTE[layer.color], line_dash=dash)
            self.figure.add_layout(slope)
            return
        source = ColumnDataSource(_data(layer))
        self.sources[layer.name] = source
        renderer = self._glyph(layer, source)
        if layer.hover:
            tips = [(heading, _tip(layer, column)) for heading, column in layer.hover.items()]
            self.figure.add_tools(HoverTool(renderers=[renderer], tooltips=tips, visible=False))
        if layer.legend:
            renderers: list[Any] = [renderer]
            renderers += [one for one in self.figure.renderers if one.name == band_of(layer.name)]
            item = LegendItem(label=value(layer.title), renderers=renderers)
            legend = self.figure.legend[0]
            legend.items = [*legend.items, item]
            legend.visible = len(legend.items) > 1
            self._longest = max(self._longest, len(layer.title))
            legend.ncols = _legend_columns(self._longest, self._wrap)

    def _explain(self, meanings: Mapping[str, str]) -> None:
        if not meanings:
            return
        for meaning in meanings.keys() - self._meanings.keys():
            glyph: Any = (
                self.figure.scatter(  # a legend item needs a glyph, so draw one without position
                    [np.nan], [np.nan], marker="square", size=12, color=PALETTE[meanings[meaning]]
                )
            )
            self._meanings[meaning] = LegendItem(label=value(meaning), renderers=[glyph])
        items = [self._meanings[meaning] for meaning in meanings]
        if items != self.figure.legend[0].items:
            columns = _legend_columns(max(map(len, meanings)), self._wrap)
            self.figure.legend[0].update(items=items, ncols=columns, click_policy="none")

    def _glyph(self, layer: Layer, source: ColumnDataSource) -> GlyphRenderer[Any]:
        color, dash = PALETTE[layer.color], "dashed" if layer.dashed else "solid"
        common: dict[str, Any] = {"source": source, "name": layer.name}
        line: dict[str, Any] = {"color": color, "line_width": 2, "line_dash": dash}
        match layer.mark:
            case "band":
                return self.figure.varea(
                    "x", "low", "high", fill_color=color, fill_alpha=0.2, level="underlay", **common
                )
            case "line":
                return self.figure.line("x", "y", **line, **common)
            case "step":
                return self.figure.step("x", "y", mode="after", **line, **common)
            case "points":
                return self.figure.scatter(
                    "x", "y", size=6, fill_color=color, line_color=None, fill_alpha=0.8, **common
                )
            case "bars":
                return self._bars(layer, color, common)
            case "spans":
                return self._spans(layer, source)
        self._label(layer)
        return self.figure.vspan(
            "x", line_color=_in_palette(), line_dash="dotted", line_width=1.5, **common
        )

    def _spans(self, layer: Layer, source: ColumnDataSource) -> GlyphRenderer[Any]:
        """Bars with shares of time replace spans that are too short to see."""
        glyph: dict[str, Any] = {"y": "y", "left": "begin", "height": "height", "line_color": None,
                                 "fill_color": _in_palette(),
                                 "fill_alpha": "shade" if "shade" in layer.columns else 1.0}  # fmt: skip
        # The browser changes both without telling the server.
        visible = BooleanFilter(booleans=None, syncable=False)
        words = [name for name in layer.hover.values() if layer.columns[name].dtype.kind in "OUST"]
        names = ["y", "height", "begin", "end", "drawn_end", "percent", "color", *words]
        names += ["shade"] * ("shade" in layer.columns)
        bars = ColumnDataSource({name: [] for name in names}, syncable=False)
        drawn = self.figure.hbar(
            right="end", source=source, view=CDSView(filter=visible), name=layer.name, **glyph
        )
        shares = self.figure.hbar(
            right="drawn_end", source=bars, name=f"{layer.name}, shares of time", **glyph
        )
        if layer.hover:
            shown = {heading: name for heading, name in layer.hover.items() if name in names}
            tips = [(heading, _tip(layer, name)) for heading, name in shown.items()]
            tips.append(("share of time (%)", "@percent{0.[0]}"))
            self.figure.add_tools(HoverTool(renderers=[shares], tooltips=tips, visible=False))
        script = CustomJS(
            args={
                "spans": source, "bars": bars, "visible": visible, "plot": self.figure,
                "min_width": chart.MIN_WIDTH, "min_visible_share": chart.MIN_VISIBLE_SHARE,
                "max_spans": chart.MAX_SPANS, "min_bin_width": chart.MIN_BIN_WIDTH,
            },
            code=_TIME_SHARES,
        )  # fmt: skip
        self._time_shares.append(script)
        for change in ("change:data", "streaming", "patching"):
            source.js_on_change(change, script)
        self.figure.js_on_change("inner_width", script)
        _follow_range(self.figure, script)
        return drawn

    def _bars(self, layer: Layer, color: str, common: dict[str, Any]) -> GlyphRenderer[Any]:
        bars = self.figure.vbar("x", "width", "y", fill_color=color, line_color=None, **common)
        if "low" in layer.columns:  # a glyph and not an annotation, so that the axis range includes it
            self.figure.segment(
                "x", "low", "x", "high", line_color=self._ink.text, source=common["source"]
            )
        return bars

    def _label(self, layer: Layer) -> None:
        """Labels of vertical lines above the plot. Bokeh leaves out some if the window is too small."""
        if layer.mark != "rules":
            return
        labels = {
            float(at): str(label)
            for at, label in zip(layer.columns["x"], layer.columns["label"], strict=True)
            if label
        }
        if labels != self._labels.major_label_overrides:
            ticker = FixedTicker(ticks=[*labels])
            self._labels.update(ticker=ticker, major_label_overrides=labels, visible=bool(labels))


def draw(chart: Chart, theme: Theme = "light", wrap: int = WRAP) -> ScreenChart:
    """`figure` of the result is a Bokeh model for a document, a page or a notebook. `wrap`: characters
    per line of a note."""
    ink = INKS[theme]
    shown = figure(
        frame_height=int(_HEIGHT * chart.height),
        sizing_mode="stretch_width",
        x_axis_type="log" if chart.x.log else "linear",
        y_axis_type="log" if chart.y.log else "linear",
        x_range=_range(chart.x),
        y_range=_range(chart.y),
        tools=_TOOLS,
        output_backend="webgl",
    )
    note = Title(
        text=_note(chart, wrap), text_font_size="11px", text_font_style="normal", text_color=ink.text
    )
    title = Title(text=fill(chart.title, int(_TITLE * wrap)), text_font_size="14px", text_color=ink.text)
    labels = LinearAxis()
    labels.update(
        ticker=FixedTicker(ticks=[]), major_label_policy=NoOverlap(), major_label_standoff=0,
        major_label_text_color=ink.text, major_label_text_font_size="10px", axis_line_color=None,
        major_tick_line_color=None, minor_tick_line_color=None, visible=False,
    )  # fmt: skip
    for layout in (labels, note, title):
        shown.add_layout(layout, "above")
    drawn = ScreenChart(shown, {}, chart, ink, note, labels, wrap)
    _add_legend(shown, ink)
    drawn._explain(chart.legend)
    for layer in chart.layers:
        drawn._add(layer)
    _style(shown, chart, ink)
    return drawn


def _legend_columns(longest: int, wrap: int) -> int:
    return max(1, int(_LEGEND * wrap) // (longest + 5))


def _add_legend(shown: figure, ink: Ink) -> None:
    """Below the plot. A click on a series hides it."""
    legend = Legend(orientation="horizontal", click_policy="hide")
    shown.add_layout(legend, "below")
    legend.update(
        label_text_color=ink.text, label_text_font_size="11px", background_fill_color=None,
        border_line_color=None, padding=0, margin=0, spacing=14, location="left",
    )  # fmt: skip


def _style(shown: figure, chart: Chart, ink: Ink) -> None:
    shown.background_fill_color = shown.border_fill_color = ink.paper
    shown.outline_line_color = None
    shown.toolbar.logo = None
    shown.toolbar.autohide = True
    for grid in (*shown.xgrid, *shown.ygrid):
        grid.grid_line_color = ink.grid
    if chart.y.ticks is not None:
        shown.ygrid[0].grid_line_color = None
    for axis, described in ((_x_axis(shown), chart.x), (shown.yaxis[0], chart.y)):
        axis.axis_label = described.title or None
        axis.update(
            axis_label_text_color=ink.text, axis_label_text_font_style="normal",
            major_label_text_color=ink.text, axis_line_color=ink.grid,
            major_tick_line_color=ink.grid, minor_tick_line_color=None,
        )  # fmt: skip
        if described.whole and described.ticks is None:
            ticker: Any = axis.ticker
            ticker.min_interval = 1
        if described.log:
            axis.formatter = BasicTickFormatter(use_scientific=False)
        _set_ticks(axis, described)


def _x_axis(shown: figure) -> BokehAxis:
    """Below the plot: a second x axis, for labels, is above it."""
    return next(one for one in shown.below if isinstance(one, BokehAxis))


def _in_palette() -> Any:
    return linear_cmap("color", list(PALETTE.values()), -0.5, len(PALETTE) - 0.5)


def _set_ticks(axis: Any, described: Axis) -> None:
    if described.ticks is not None:
        axis.ticker = list(described.ticks)
        axis.major_label_overrides = dict(described.ticks)


def _range(axis: Axis) -> Range:
    low, high = axis.limits
    if low is not None and high is not None:
        return Range1d(start=low, end=high)
    found = DataRange1d(only_visible=True)
    _set_limits(found, axis)
    return found


def _follow_range(shown: figure, script: CustomJS) -> None:
    for name in ("start", "end"):
        shown.x_range.js_on_change(name, script)


def _set_limits(shown: Any, axis: Axis) -> None:
    low, high = axis.limits
    if low is not None:
        shown.start = low
    if high is not None:
        shown.end = high


def _data(layer: Layer) -> dict[str, Any]:
    return {name: _to_browser(column) for name, column in layer.columns.items()}


def _to_browser(column: Column) -> Any:
    """Copy for the browser, because `exchange` changes columns in place. The binary form of numbers
    supports 64-bit floats, but not 64-bit integers."""
    if column.dtype.kind in "OUST":
        return _Texts(column.astype(str).tolist())
    return column.astype(np.float64 if column.dtype.kind in "iu" else column.dtype)


def _tip(layer: Layer, column: str) -> str:
    if column.startswith("$"):
        return column
    floats = layer.columns[column].dtype.kind == "f"
    return f"@{{{column}}}" + ("{0,0.[0000]}" if floats else "")


def _note(chart: Chart, wrap: int) -> str:
    return fill("; ".join(filter(None, ("no data" if chart.is_empty else "", chart.whole_note))), wrap)
