"""The data of a chart before it is drawn: layers with columns, two axes, and spans that are too short to
see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import ceil, log2
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

Column = npt.NDArray[Any]
Mark = Literal["line", "step", "band", "points", "bars", "spans", "rules", "diagonal"]
"""Kind of a layer. It says how the layer is drawn, and which columns the layer needs.

- `line`, `step` (constant to the right of each point), `points`: `x`, `y`.
- `band`, the area between two lines: `x`, `low`, `high`.
- `bars`: `x` (middle), `y`, `width`; optionally `low` and `high`, the ends of a confidence interval.
- `spans`, rectangles: `y` (middle), `height`, `begin`, `end`, `color` (index in `PALETTE`); optionally
  `shade`, the opacity from 0 to 1.
- `rules`, vertical lines: `x`, `label` (written above the plot; may be empty), `color` (index in
  `PALETTE`).
- `diagonal`, the line y = x: no columns.
"""

PALETTE = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "red": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "grey": "#8A8A8A",
    "yellow": "#C9B400",
}
"""Colours of Okabe and Ito, which colour-blind people can distinguish, with a medium grey instead of
black and a darker yellow, so that they are visible on white and on black."""
COLORS = tuple(PALETTE)

Theme = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Ink:
    paper: str
    text: str
    grid: str


INKS: Mapping[Theme, Ink] = {
    "light": Ink(paper="#ffffff", text="#24292f", grid="#dde1e6"),
    "dark": Ink(paper="#16191d", text="#d7dce2", grid="#3a4048"),
}


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    unit: str = ""
    log: bool = False
    whole: bool = False
    """Values are integers, and so are ticks."""
    ticks: Mapping[float, str] | None = None
    """Labels of the ticks, by position; None if the ticks are labelled with numbers."""
    limits: tuple[float | None, float | None] = (None, None)
    """None for an end that is chosen automatically."""

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True, slots=True)
class Layer:
    """When a chart is updated, a layer replaces the layer of the same name."""

    name: str
    mark: Mark
    columns: Mapping[str, Column]
    """Columns of equal length, as `mark` needs."""
    color: str = "blue"
    """Name in `PALETTE`."""
    _: KW_ONLY
    legend: bool = True
    label: str = ""
    """Label in the legend. If it is empty, the name of the layer is used."""
    dashed: bool = False
    reference: bool = False
    """Only a reference for other layers: `Chart.is_bare` does not count its points."""
    hover: Mapping[str, str] = field(default_factory=dict)
    """Tooltip of a point: heading -> column whose value is shown, or `$name` for the layer's name."""

    def __post_init__(self) -> None:
        if len({len(column) for column in self.columns.values()}) > 1:
            raise ValueError(f"columns of {self.name!r} differ in length")
        unknown = {name for name in self.hover.values() if name[0] != "$"} - self.columns.keys()
        if unknown:
            raise ValueError(f"the tooltip of {self.name!r} needs missing columns: {sorted(unknown)}")

    @property
    def title(self) -> str:
        return self.label or self.name


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    layers: tuple[Layer, ...]
    _: KW_ONLY
    legend: Mapping[str, str] = field(default_factory=dict)
    """Meaning -> name in `PALETTE`, if a layer has several colours (`spans`)."""
    note: str = ""
    """Text below the title."""
    remarks: tuple[str, ...] = ()
    """Shared with other charts of the same run. Below the title, after the note; once on a page of
    several charts."""
    key: tuple[str, ...] = ()
    """Explanations of numbered vertical lines (`rules`), in print below the plot."""
    height: float = 1.0
    """Relative to the usual height of a chart."""

    @property
    def is_empty(self) -> bool:
        """No data except rules and diagonals."""
        drawn = [layer.columns for layer in self.layers if layer.mark not in ("rules", "diagonal")]
        return not any(
            pd.notna(columns["x"]).any() if "x" in columns else any(map(len, columns.values()))
            for columns in drawn
        )

    @property
    def is_bare(self) -> bool:
        """Too little data to show: no span, and at most one point or bar, without layers with
        `reference`."""
        points = 0
        for layer in self.layers:
            if layer.mark == "spans" and len(layer.columns["begin"]):
                return False
            if layer.mark in ("line", "step", "points", "bars") and not layer.reference:
                x, y = (np.asarray(layer.columns[name], np.float64) for name in ("x", "y"))
                shown = np.isfinite(x) & np.isfinite(y) & ((layer.mark != "bars") | (y != 0))
                points += int(shown.sum())
        return points < 2

    @property
    def whole_note(self) -> str:
        """The note, then the remarks."""
        return "; ".join(filter(None, (self.note, *self.remarks)))

    def with_note(self, *notes: str) -> Chart:
        return replace(self, note="; ".join(filter(None, (self.note, *notes))))

    def with_remarks(self, *remarks: str) -> Chart:
        return replace(self, remarks=(*self.remarks, *remarks))


def remarks(charts: Iterable[Chart]) -> tuple[str, ...]:
    return (*dict.fromkeys(remark for chart in charts for remark in chart.remarks),)


def band_of(name: str) -> str:
    """Name of the band that belongs to the line `name`."""
    return f"{name}, range"


def color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def arrays(**columns: Any) -> dict[str, Column]:
    return {name: np.asarray(column) for name, column in columns.items()}


def group_ticks(labels: Sequence[str], groups: Sequence[str], max_labels: int) -> dict[float, str]:
    """Ticks at 0, 1, 2, …; for more than `max_labels`, one per group, in its middle."""
    if len(labels) <= max_labels:
        return {float(place): label for place, label in enumerate(labels)}
    places: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    return {float(np.mean(found)): f"{group} ×{len(found)}" for group, found in places.items()}


# Spans that are too short to see, as shares of time.
#
# A lane with many spans per pixel would be a mush of colours. So it is divided into bins of time. Each
# bin has a bar per kind of span, stacked on each other, as high as the share of the bin's time that
# these spans cover. The space above is the time without spans.
#
# `paper` uses this. For `screen`, `time_shares.js` does the same in JavaScript, because the visitor's
# zoom decides which spans are too short.

MIN_WIDTH = 2.0
"""Pixels from which a span is visible."""
MIN_VISIBLE_SHARE = 0.2
"""A lane is drawn as spans if at least this share of them is visible."""
MAX_SPANS = 10
"""A lane is drawn as spans if it has at most this many."""
MIN_BIN_WIDTH = 4.0
"""Pixels. The duration of a bin is a power of two, in seconds, so that bins stay the same while a run
becomes longer."""

_USUAL_WIDTH = 1000.0
"""Pixels of a plot with lanes."""


def find_crowded(spans: Mapping[str, Column], seconds_per_pixel: float) -> npt.NDArray[np.bool_]:
    """For each span, whether its lane is drawn as shares of time: few of its spans are visible, and
    there is at least one per bin on average. `spans`: columns of a layer with the mark `spans`."""
    begin, end = spans["begin"], spans["end"]
    lanes, lane = np.unique(spans["y"], return_inverse=True)
    visible = np.bincount(lane, end - begin >= MIN_WIDTH * seconds_per_pixel, len(lanes))
    count = np.bincount(lane, minlength=len(lanes))
    first, last = np.full(len(lanes), np.inf), np.full(len(lanes), -np.inf)
    np.minimum.at(first, lane, begin)
    np.maximum.at(last, lane, end)
    dense = count * MIN_BIN_WIDTH * seconds_per_pixel > last - first
    found = dense & (count > MAX_SPANS) & (visible < MIN_VISIBLE_SHARE * count)
    return np.asarray(found[lane], bool)


def bin_seconds(seconds_per_pixel: float) -> float:
    return float(2.0 ** ceil(log2(MIN_BIN_WIDTH * seconds_per_pixel)))


def shares_of_time(spans: Mapping[str, Column], step: float) -> dict[str, Column]:
    """Return the bars that replace `spans`, all of whose lanes must be crowded, with the columns of
    spans, and always `shade`. `step`: duration of a bin in seconds.

    The bars of a bin are stacked in the order of their colours in `PALETTE`. The first has the highest
    y.
    """
    begin, end = spans["begin"], spans["end"]
    lanes, lane = np.unique(spans["y"], return_inverse=True)
    shade = spans.get("shade", np.ones(len(begin)))
    kinds, kind = np.unique(spans["color"] - shade / 2, return_inverse=True)  # a shade is at most 1
    first = np.floor(begin / step).astype(np.int64)
    count = np.maximum(np.ceil(end / step).astype(np.int64) - first, 1)
    row = np.repeat(np.arange(len(begin)), count)
    number = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    covered = np.minimum(end[row], (number + 1) * step) - np.maximum(begin[row], number * step)
    earliest = int(number.min())
    size = len(lanes), int(number.max()) - earliest + 1, len(kinds)
    place = np.ravel_multi_index((lane[row], number - earliest, kind[row]), size)
    span = np.full(np.prod(size), -1)
    span[place] = row
    bars = np.flatnonzero(span >= 0)
    lane, number, _ = np.unravel_index(bars, size)
    number, span = number + earliest, span[bars]
    left = np.maximum(number * step, begin.min(initial=0.0))
    right = np.minimum((number + 1) * step, end.max(initial=0.0))
    share = np.bincount(place, covered)[bars] / (right - left)
    starts = np.ones(len(bars), bool)  # whether a bar is the first of its bin and lane
    starts[1:] = (lane[1:] != lane[:-1]) | (number[1:] != number[:-1])
    total = np.cumsum(share)
    below = (total - share)[np.maximum.accumulate(np.where(starts, np.arange(len(bars)), 0))]
    height = spans["height"][span]
    return arrays(
        y=lanes[lane] + height / 2 - height * (total - below - share / 2),
        height=height * share,
        begin=left,
        end=right,
        color=spans["color"][span],
        shade=shade[span],
    )


def shares_note(spans: Mapping[str, Column]) -> str:
    """Empty if a plot of the usual width draws all lanes as spans."""
    if not len(spans["begin"]):
        return ""
    seconds = float(spans["end"].max() - spans["begin"].min())
    if not find_crowded(spans, seconds / _USUAL_WIDTH).any():
        return ""
    return "short intervals: shares of time"
