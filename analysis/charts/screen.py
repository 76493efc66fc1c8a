"""Charts for the screen: a `Chart` as a Bokeh figure with zoom, tooltips and updates.

Every layer has its own data source: `Drawn.update` exchanges their columns in place, and
`Drawn.sources[layer.name].stream(...)` adds rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.models.annotations import LabelSet, Legend, LegendItem, Slope, Title, Whisker
from bokeh.models.formatters import BasicTickFormatter
from bokeh.models.ranges import DataRange1d, Range, Range1d
from bokeh.models.renderers import GlyphRenderer
from bokeh.models.sources import ColumnDataSource
from bokeh.models.tools import HoverTool
from bokeh.plotting import figure
from bokeh.transform import linear_cmap

from analysis.charts.chart import INKS, PALETTE, Axis, Chart, Column, Ink, Layer, Theme
from analysis.charts.exchange import exchange

_HEIGHT = 240
"""Pixels of the usual height, without title, axis and legend."""
_TOOLS = "pan,xwheel_zoom,wheel_zoom,box_zoom,reset,save"


@dataclass(slots=True)
class Drawn:
    """A chart on the screen."""

    figure: figure
    sources: dict[str, ColumnDataSource]
    """By the name of the layer."""
    _chart: Chart
    """The newest."""
    _ink: Ink
    _note: Title

    def update(self, chart: Chart) -> None:
        """Show `chart`, a newer state of the same one, in the same figure: zoom and selections remain.

        A new layer is added; one that is gone is emptied.
        """
        for layer in chart.layers:
            if layer.name in self.sources:
                exchange(self.sources[layer.name], _data(layer), ordered=layer.mark in ("line", "step"))
            elif layer.mark != "diagonal":
                self._add(layer)
        for name in self.sources.keys() - {layer.name for layer in chart.layers}:
            data: dict[str, Any] = dict(self.sources[name].data)
            self.sources[name].data = {column: rows[:0] for column, rows in data.items()}
        self._note.text = _note(chart)
        for drawn, bokeh_range, old, new in (
            (self.figure.xaxis[0], self.figure.x_range, self._chart.x, chart.x),
            (self.figure.yaxis[0], self.figure.y_range, self._chart.y, chart.y),
        ):
            _set_ticks(drawn, new)
            if old.limits != new.limits:
                _set_limits(bokeh_range, new)
        self._chart = chart

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
            item = LegendItem(label=value(layer.title), renderers=[renderer])
            legend = self.figure.legend[0]
            legend.items = [*legend.items, item]
            legend.visible = len(legend.items) > 1

    def _glyph(self, layer: Layer, source: ColumnDataSource) -> GlyphRenderer[Any]:
        color, dash = PALETTE[layer.color], "dashed" if layer.dashed else "solid"
        common: dict[str, Any] = {"source": source, "name": layer.name}
        line: dict[str, Any] = {"color": color, "line_width": 2, "line_dash": dash}
        match layer.mark:
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
                cmap = linear_cmap("color", list(PALETTE.values()), -0.5, len(PALETTE) - 0.5)
                return self.figure.hbar(
                    y="y",
                    left="begin",
                    right="end",
                    height="height",
                    fill_color=cmap,
                    fill_alpha="shade" if "shade" in layer.columns else 1.0,
                    line_color=None,
                    **common,
                )
        return self._rules(color, common)

    def _bars(self, layer: Layer, color: str, common: dict[str, Any]) -> GlyphRenderer[Any]:
        bars = self.figure.vbar("x", "width", "y", fill_color=color, line_color=None, **common)
        if "low" in layer.columns:
            whisker = Whisker(base="x", lower="low", upper="high", source=common["source"])
            whisker.update(line_color=self._ink.text, lower_head=None, upper_head=None)
            self.figure.add_layout(whisker)
        return bars

    def _rules(self, color: str, common: dict[str, Any]) -> GlyphRenderer[Any]:
        rules = self.figure.vspan("x", line_color=color, line_dash="dotted", line_width=1.5, **common)
        labels = LabelSet(
            x="x", y=4, y_units="screen", text="label", angle=np.pi / 2, y_offset=4, x_offset=-2,
            source=common["source"], text_font_size="10px", text_color=self._ink.text,
            background_fill_color=self._ink.paper, background_fill_alpha=0.7,
        )  # fmt: skip
        self.figure.add_layout(labels)
        return rules


def draw(chart: Chart, theme: Theme = "light") -> Drawn:
    """`Drawn.figure` is a Bokeh model, for a document, a page or a notebook."""
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
    note = Title(text=_note(chart), text_font_size="11px", text_font_style="normal", text_color=ink.text)
    title = Title(text=chart.title, text_font_size="14px", text_color=ink.text)
    shown.add_layout(note, "above")
    shown.add_layout(title, "above")
    drawn = Drawn(shown, {}, chart, ink, note)
    _add_legend(shown, chart, ink)
    for layer in chart.layers:
        drawn._add(layer)
    _style(shown, chart, ink)
    return drawn


def _add_legend(shown: figure, chart: Chart, ink: Ink) -> None:
    """Below the plot, where it hides nothing; a click on a series hides it."""
    longest = max((len(layer.title) for layer in chart.layers), default=0)
    legend = Legend(orientation="horizontal", ncols=max(1, 100 // (longest + 5)))
    legend.click_policy = "none" if chart.legend else "hide"
    for meaning, color in chart.legend.items():  # an item needs a glyph: one at no place
        glyph: Any = shown.scatter([np.nan], [np.nan], marker="square", size=12, color=PALETTE[color])
        legend.items = [*legend.items, LegendItem(label=value(meaning), renderers=[glyph])]
    shown.add_layout(legend, "below")
    legend.update(
        label_text_color=ink.text, label_text_font_size="11px", background_fill_color=None,
        border_line_color=None, padding=0, margin=0, location="left",
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
    for axis, described in ((shown.xaxis[0], chart.x), (shown.yaxis[0], chart.y)):
        axis.axis_label = described.title or None
        axis.update(
            axis_label_text_color=ink.text, axis_label_text_font_style="normal",
            major_label_text_color=ink.text, axis_line_color=ink.grid,
            major_tick_line_color=ink.grid, minor_tick_line_color=None,
        )  # fmt: skip
        _set_ticks(axis, described)


def _set_ticks(axis: Any, described: Axis) -> None:
    if described.log:
        axis.formatter = BasicTickFormatter(use_scientific=False)
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


def _set_limits(shown: Any, axis: Axis) -> None:
    low, high = axis.limits
    if low is not None:
        shown.start = low
    if high is not None:
        shown.end = high


def _data(layer: Layer) -> dict[str, Any]:
    return {name: _to_browser(column) for name, column in layer.columns.items()}


def _to_browser(column: Column) -> Any:
    """A copy, as `exchange` changes it in place. Numbers are sent in binary, which takes floats of 64
    bits, but not integers of 64."""
    if column.dtype.kind in "OUST":
        return column.astype(str).tolist()
    return column.astype(np.float64 if column.dtype.kind in "iu" else column.dtype)


def _tip(layer: Layer, column: str) -> str:
    if column.startswith("$"):
        return column
    floats = layer.columns[column].dtype.kind == "f"
    return f"@{{{column}}}" + ("{0,0.[0000]}" if floats else "")


def _note(chart: Chart) -> str:
    return replace(chart, note="no data yet").with_note(chart.note).note if chart.empty else chart.note
