"""The data of a chart before it is drawn: layers with columns, and two axes. The module is independent
of runs and of drawing libraries."""

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
"""Colours that colour-blind people can distinguish and that are visible on white and on black. They are
the colours of Okabe and Ito, with a medium grey instead of black and a darker yellow."""
COLORS = tuple(PALETTE)

Theme = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Ink:
    """The colours of a theme."""

    paper: str
    text: str
    grid: str


INKS: Mapping[Theme, Ink] = {
    "light": Ink(paper="#ffffff", text="#24292f", grid="#dde1e6"),
    "dark": Ink(paper="#16191d", text="#d7dce2", grid="#3a4048"),
}


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart."""

    label: str
    unit: str = ""
    log: bool = False
    """Whether the scale is logarithmic."""
    whole: bool = False
    """Whether the values are integers, so that ticks are at integers only."""
    ticks: Mapping[float, str] | None = None
    """Labels of the ticks, by position; None if the ticks are labelled with numbers."""
    limits: tuple[float | None, float | None] = (None, None)
    """Lower and upper end of the axis. An end that is chosen automatically is None."""

    @property
    def title(self) -> str:
        """Label of the axis with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True, slots=True)
class Layer:
    """One series of a chart. When a chart is updated, a layer replaces the layer of the same name."""

    name: str
    mark: Mark
    columns: Mapping[str, Column]
    """Columns of equal length, as `mark` needs."""
    color: str = "blue"
    """A name in `PALETTE`."""
    _: KW_ONLY
    legend: bool = True
    """Whether the layer is in the legend."""
    label: str = ""
    """Label in the legend. If it is empty, the name of the layer is used."""
    dashed: bool = False
    reference: bool = False
    """Whether the layer is only a reference for other layers. `Chart.is_bare` does not count its
    points."""
    hover: Mapping[str, str] = field(default_factory=dict)
    """Lines of a point's tooltip: heading -> column whose value is shown, or `$name` for the layer's
    name."""

    def __post_init__(self) -> None:
        if len({len(column) for column in self.columns.values()}) > 1:
            raise ValueError(f"columns of {self.name!r} differ in length")
        unknown = {name for name in self.hover.values() if name[0] != "$"} - self.columns.keys()
        if unknown:
            raise ValueError(f"the tooltip of {self.name!r} needs missing columns: {sorted(unknown)}")

    @property
    def title(self) -> str:
        """Name in the legend."""
        return self.label or self.name


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, independent of how it is drawn."""

    title: str
    x: Axis
    y: Axis
    layers: tuple[Layer, ...]
    _: KW_ONLY
    legend: Mapping[str, str] = field(default_factory=dict)
    """Legend of colours: meaning -> name in `PALETTE`. Used by charts in which one layer has several
    colours (`spans`)."""
    note: str = ""
    """Text below the title."""
    remarks: tuple[str, ...] = ()
    """Remarks that other charts of the same run have, too. They are written below the title, after the
    note. A page of several charts shows each remark once."""
    key: tuple[str, ...] = ()
    """Explanations of the labels of vertical lines (`rules`) if these labels are numbers. In print, the
    explanations are written below the plot."""
    height: float = 1.0
    """Height relative to the usual height of a chart."""

    @property
    def is_empty(self) -> bool:
        """Whether the chart has no data except rules and diagonals."""
        drawn = [layer.columns for layer in self.layers if layer.mark not in ("rules", "diagonal")]
        return not any(
            pd.notna(columns["x"]).any() if "x" in columns else any(map(len, columns.values()))
            for columns in drawn
        )

    @property
    def is_bare(self) -> bool:
        """Whether there is too little data to show: no span, and at most one point or bar. Layers with
        `reference` are not counted."""
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
        """The note, followed by the remarks."""
        return "; ".join(filter(None, (self.note, *self.remarks)))

    def with_note(self, *notes: str) -> Chart:
        """Return the chart with `notes` added to its note."""
        return replace(self, note="; ".join(filter(None, (self.note, *notes))))

    def with_remarks(self, *remarks: str) -> Chart:
        """Return the chart with `remarks` added to its remarks."""
        return replace(self, remarks=(*self.remarks, *remarks))


def remarks(charts: Iterable[Chart]) -> tuple[str, ...]:
    """Return the remarks of `charts`, each once."""
    return (*dict.fromkeys(remark for chart in charts for remark in chart.remarks),)


def band_of(name: str) -> str:
    """Return the name of the band that belongs to the line `name`."""
    return f"{name}, range"


def color(index: int) -> str:
    """Return the colour of series number `index`."""
    return COLORS[index % len(COLORS)]


def arrays(**columns: Any) -> dict[str, Column]:
    """Return `columns` as NumPy arrays."""
    return {name: np.asarray(column) for name, column in columns.items()}


def group_ticks(labels: Sequence[str], groups: Sequence[str], max_labels: int) -> dict[float, str]:
    """Return ticks at 0, 1, 2, … with `labels`. If there are more than `max_labels` labels, return one
    tick per group instead, in the middle of the group."""
    if len(labels) <= max_labels:
        return {float(place): label for place, label in enumerate(labels)}
    places: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    return {float(np.mean(found)): f"{group} ×{len(found)}" for group, found in places.items()}
