"""Charts for print: a `Chart` as a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from textwrap import fill, shorten
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis.charts.chart import (
    COLORS,
    INKS,
    PALETTE,
    Axis,
    Chart,
    Column,
    Ink,
    Layer,
    Theme,
    bin_seconds,
    find_crowded,
    shares_of_time,
)

_SIZE = (6.4, 3.6)
"""Width of a page's text, and usual height of a chart, in inches."""
_DPI = 150
_PLOT_PIXELS = 850
"""Approximate width of a plot in pixels, without the labels of the y axis."""
_MAX_BINS = 100_000
"""Maximum number of lanes × time bins when spans that are too short to see are drawn as shares of
time."""
_STRIP = 0.6
"""Relative height below which a chart in a stack has small labels."""
_MAX_SHAPES = 2_000
"""Vector shapes in a layer; more are drawn as pixels, because a PDF with all of them would be too
large."""
_MAX_NOTE = 110
"""Characters per line."""
_MAX_KEY, _KEY_COLUMNS = 48, 3
"""Characters per entry, and entries per line."""


def draw(chart: Chart, theme: Theme = "light") -> Figure:
    """`savefig` of the returned figure writes PDF, SVG or PNG."""
    ink = INKS[theme]
    height = _SIZE[1] * (0.35 + 0.65 * chart.height if chart.height > 1 else 1)
    figure = _figure(height, ink)
    axes = figure.add_subplot()
    _draw(axes, chart, ink)
    _add_key(axes, chart, ink)
    _add_legend(figure, axes, chart, ink)
    return figure


def stack(charts: Sequence[Chart], theme: Theme = "light") -> Figure:
    """Below each other, with the same x axis and the legend of the first chart."""
    ink = INKS[theme]
    heights = [chart.height for chart in charts]
    figure = _figure(_SIZE[1] * (0.25 + sum(heights)), ink)
    grid = figure.subplots(len(charts), sharex=True, squeeze=False, height_ratios=heights)
    for axes, chart in zip(grid[:, 0], charts, strict=True):
        _draw(axes, chart, ink)
        axes.label_outer()
        if chart.height < _STRIP:
            axes.tick_params(axis="y", labelsize=5.5, length=0)
            axes.set_title(chart.title, loc="left", fontsize=8, color=ink.text, pad=2)
    for axes in grid[:-1, 0]:
        axes.tick_params(axis="x", length=0)
    figure.set_layout_engine("constrained", h_pad=0.015)
    _add_legend(figure, grid[0, 0], charts[0], ink)
    return figure


def _figure(height: float, ink: Ink) -> Figure:
    return Figure(figsize=(_SIZE[0], height), dpi=_DPI, layout="constrained", facecolor=ink.paper)


def _draw(axes: Axes, chart: Chart, ink: Ink) -> None:
    _style(axes, chart, ink)
    for layer in chart.layers:
        if layer.mark != "diagonal":
            _MARKS[layer.mark](axes, layer, ink)
    _set_limits(axes, chart)
    for layer in chart.layers:
        if layer.mark == "diagonal":  # needs the limits, because it is drawn from edge to edge
            _diagonal(axes, layer)


def _add_legend(figure: Figure, axes: Axes, chart: Chart, ink: Ink) -> None:
    handles, labels = axes.get_legend_handles_labels()
    handles += [Patch(color=PALETTE[color]) for color in chart.legend.values()]
    labels += list(chart.legend)
    if len(labels) > 1 or chart.legend:
        widest = 5 if max(map(len, labels)) < 16 else 3
        columns = ceil(len(labels) / ceil(len(labels) / widest))
        legend = figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8,
            labelcolor=ink.text,
        )  # fmt: skip
        for handle in legend.legend_handles:
            if isinstance(handle, PathCollection):
                handle.set(sizes=[18], alpha=1)


def _add_key(axes: Axes, chart: Chart, ink: Ink) -> None:
    """Below the plot, for the numbers above it."""
    entries = [shorten(entry, _MAX_KEY, placeholder=" …") for entry in chart.key]
    rows = ceil(len(entries) / _KEY_COLUMNS)
    for column in range(_KEY_COLUMNS if entries else 0):
        axes.annotate(
            "\n".join(entries[column * rows : (column + 1) * rows]), (column / _KEY_COLUMNS, 0),
            xycoords="axes fraction", xytext=(0, -32), textcoords="offset points", va="top",
            fontsize=5.5, color=ink.text,
        )  # fmt: skip


def _style(axes: Axes, chart: Chart, ink: Ink) -> None:
    axes.set_facecolor(ink.paper)
    marked = any(layer.mark == "rules" and len(layer.columns["x"]) for layer in chart.layers)
    lift = 9 if marked else 0  # for the labels of the rules
    note = fill(shorten(chart.whole_note, 3 * _MAX_NOTE, placeholder=" …"), _MAX_NOTE)
    lines = len(note.splitlines())
    above = 6 + lift + (3 + 9 * lines if lines else 0)
    axes.set_title(chart.title, loc="left", fontsize=10, color=ink.text, pad=above)
    axes.annotate(
        note, (0, 1), xycoords="axes fraction", xytext=(0, 4 + lift), textcoords="offset points",
        fontsize=7, color=ink.text, in_layout=False, va="bottom",
    )  # fmt: skip
    _style_axis(axes, "x", chart.x)
    _style_axis(axes, "y", chart.y)
    axes.tick_params(colors=ink.text, labelsize=8)
    axes.grid(color=ink.grid, linewidth=0.5, visible=True)
    if chart.y.ticks is not None:
        axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ink.grid)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=ink.text, fontsize=9)
    if chart.is_empty:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=ink.text)


def _style_axis(axes: Axes, which: str, axis: Axis) -> None:
    axes.set(**{f"{which}label": axis.title})
    if axis.ticks is not None:
        axes.set(**{f"{which}ticks": list(axis.ticks), f"{which}ticklabels": list(axis.ticks.values())})
    if axis.whole and axis.ticks is None:
        (axes.xaxis if which == "x" else axes.yaxis).set_major_locator(MaxNLocator(integer=True))
    if axis.log:
        axes.set(**{f"{which}scale": "log"})
        (axes.xaxis if which == "x" else axes.yaxis).set_major_formatter("{x:g}")


def _set_limits(axes: Axes, chart: Chart) -> None:
    """Call this after everything is drawn: when one limit of an axis is set, matplotlib stops adapting
    the axis."""
    for axis, set_limits in ((chart.x, axes.set_xlim), (chart.y, axes.set_ylim)):
        low, high = axis.limits
        if low is not None or high is not None:
            set_limits(low, high)


def _line(axes: Axes, layer: Layer, ink: Ink) -> None:
    columns = layer.columns
    style = "steps-post" if layer.mark == "step" else "default"
    dots = "o" if layer.mark == "line" and len(columns["x"]) < 50 else ""
    axes.plot(
        columns["x"], columns["y"], color=PALETTE[layer.color], label=_label(layer), drawstyle=style,
        linestyle="--" if layer.dashed else "-", linewidth=1.4, marker=dots, markersize=2.5,
    )  # fmt: skip


def _band(axes: Axes, layer: Layer, ink: Ink) -> None:
    x, low, high = (layer.columns[name] for name in ("x", "low", "high"))
    axes.fill_between(x, low, high, color=PALETTE[layer.color], alpha=0.2, linewidth=0)


def _points(axes: Axes, layer: Layer, ink: Ink) -> None:
    columns, many = layer.columns, len(layer.columns["x"]) > 500
    axes.scatter(
        columns["x"], columns["y"], s=6 if many else 18, color=PALETTE[layer.color], linewidths=0,
        alpha=0.5 if many else 0.85, label=_label(layer), rasterized=len(columns["x"]) > _MAX_SHAPES,
    )  # fmt: skip


def _bars(axes: Axes, layer: Layer, ink: Ink) -> None:
    columns = layer.columns
    axes.bar(
        columns["x"], columns["y"], columns["width"], color=PALETTE[layer.color], label=_label(layer)
    )
    if "low" in columns:
        known = ~np.isnan(columns["low"])
        x, low, high = (columns[name][known] for name in ("x", "low", "high"))
        axes.vlines(x, low, high, color=ink.text, linewidth=1)


def _spans(axes: Axes, layer: Layer, ink: Ink) -> None:
    spans = layer.columns
    if len(spans["begin"]):
        pixel = float(spans["end"].max() - spans["begin"].min()) / _PLOT_PIXELS
        crowded = find_crowded(spans, pixel)
        short = {name: column[crowded] for name, column in spans.items()}
        lanes = len(np.unique(short["y"]))
        if lanes:
            step = bin_seconds(pixel * max(1.0, lanes * _PLOT_PIXELS / _MAX_BINS))
            _rectangles(axes, shares_of_time(short, step), ink, sharp=True)
        spans = {name: column[~crowded] for name, column in spans.items()}
    _rectangles(axes, spans, ink)


def _rectangles(axes: Axes, columns: Mapping[str, Column], ink: Ink, *, sharp: bool = False) -> None:
    """`sharp`: without edges and smoothing, so that the background does not show between adjacent
    spans."""
    y, height, begin, end, color = (columns[name] for name in ("y", "height", "begin", "end", "color"))
    low, high = y - height / 2, y + height / 2
    # PolyCollection accepts an array and makes all shapes together, although matplotlib's types do not
    # say so.
    corners: Any = np.stack([[begin, low], [begin, high], [end, high], [end, low]]).transpose(2, 0, 1)
    colors = to_rgba_array(list(PALETTE.values()))[color]
    colors[:, 3] = columns.get("shade", 1.0)
    few = len(begin) < _MAX_SHAPES and not sharp
    shapes = PolyCollection(  # edges separate adjacent spans if there are few
        corners, facecolors=colors, edgecolors=ink.paper if few else "none", linewidths=0.4,
        antialiased=few,
    )  # fmt: skip
    shapes.set_rasterized(sharp or len(begin) > _MAX_SHAPES)
    axes.add_collection(shapes)
    axes.autoscale_view()


def _rules(axes: Axes, layer: Layer, ink: Ink) -> None:
    columns = (layer.columns[name] for name in ("x", "label", "color"))
    for at, label, color in zip(*columns, strict=True):
        axes.axvline(at, color=PALETTE[COLORS[color]], linewidth=0.8, linestyle=":")
        if label:
            axes.annotate(
                label, (at, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
                textcoords="offset points", ha="center", va="bottom", fontsize=6, color=ink.text,
                in_layout=False,
            )  # fmt: skip


def _diagonal(axes: Axes, layer: Layer) -> None:
    style = "--" if layer.dashed else "-"
    low, high = axes.get_xlim()
    axes.plot(
        [low, high], [low, high], color=PALETTE[layer.color], linewidth=1, linestyle=style,
        label=_label(layer), scalex=False, scaley=False,
    )  # fmt: skip


def _label(layer: Layer) -> str:
    return layer.title if layer.legend else "_"


_MARKS: dict[str, Callable[[Axes, Layer, Ink], None]] = {
    "line": _line,
    "step": _line,
    "band": _band,
    "points": _points,
    "bars": _bars,
    "spans": _spans,
    "rules": _rules,
}
