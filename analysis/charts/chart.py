"""Data of a chart before it is drawn: layers with columns, and two axes. Independent of runs and drawing
libraries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
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
