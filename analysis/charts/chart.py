"""The data of a chart, before it is drawn: layers of columns and two axes. Independent of runs and of
drawing libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]
Mark = Literal["line", "step", "band", "points", "bars", "spans", "rules", "diagonal"]
"""What a layer is drawn as, with the columns that it needs:

`line`, `step` (constant to the right of each point), `points`: `x`, `y`.
`band`: `x`, `low`, `high`: the area between the two.
`bars`: `x` (middle), `y`, and `width`; perhaps `low` and `high`, the ends of an interval of confidence.
`spans`: `y` (middle), `height`, `begin`, `end`, `color` (index in `PALETTE`): rectangles; perhaps
`shade`, how much of the colour, from 0 to 1.
`rules`: `x`, `label` (written above the plot; none where empty), `color` (index in `PALETTE`): vertical
lines.
`diagonal`: none: where y = x.
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
"""Colours that the colour-blind distinguish, visible on white and on black: Okabe and Ito's, with a
middle grey for their black and a darker yellow."""
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
    label: str
    unit: str = ""
    log: bool = False
    whole: bool = False
    """Of whole numbers: no ticks between them."""
    ticks: Mapping[float, str] | None = None
    """Labels by position, in place of numbers."""
    limits: tuple[float | None, float | None] = (None, None)

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True, slots=True)
class Layer:
    """One series. Its name is its identity: new data of the same name replaces the old."""

    name: str
    mark: Mark
    columns: Mapping[str, Column]
    color: str = "blue"
    """Of `PALETTE`."""
    _: KW_ONLY
    legend: bool = True
    """Whether it is in the legend."""
    label: str = ""
    """In the legend; empty: its name."""
    dashed: bool = False
    hover: Mapping[str, str] = field(default_factory=dict)
    """The tooltip of a point: the column (`$name`: the layer's name) that it shows by heading."""

    def __post_init__(self) -> None:
        if len({len(column) for column in self.columns.values()}) > 1:
            raise ValueError(f"columns of {self.name!r} differ in length")
        unknown = {name for name in self.hover.values() if name[0] != "$"} - self.columns.keys()
        if unknown:
            raise ValueError(f"{self.name!r} is to tell of columns that it lacks: {sorted(unknown)}")

    @property
    def title(self) -> str:
        """What the legend calls it."""
        return self.label or self.name


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    layers: tuple[Layer, ...]
    _: KW_ONLY
    legend: Mapping[str, str] = field(default_factory=dict)
    """What colours mean, where layers have several (`spans`): the name of the colour by its meaning."""
    note: str = ""
    """Shown below the title."""
    key: tuple[str, ...] = ()
    """What the labels of `rules` stand for, where these are numbers; on paper it is below the plot."""
    height: float = 1.0
    """Relative to the usual height."""

    @property
    def empty(self) -> bool:
        """Whether there is no data: nothing but rules and diagonals."""
        drawn = [layer for layer in self.layers if layer.mark not in ("rules", "diagonal")]
        return not any(len(column) for layer in drawn for column in layer.columns.values())

    @property
    def bare(self) -> bool:
        """Whether there is too little to look at: no span, or a single point or bar."""
        points = 0
        for layer in self.layers:
            if layer.mark == "spans" and len(layer.columns["begin"]):
                return False
            if layer.mark in ("line", "points", "bars"):
                y = np.asarray(layer.columns["y"], np.float64)
                points += int((np.isfinite(y) & ((layer.mark != "bars") | (y != 0))).sum())
        return points < 2

    def with_note(self, *notes: str) -> Chart:
        """The same chart with `notes` added to its note."""
        return replace(self, note="; ".join(filter(None, (self.note, *notes))))


def band_of(name: str) -> str:
    """The name of the band that belongs to the line `name`."""
    return f"{name}, range"


def color(index: int) -> str:
    """The colour of the `index`-th of several series of one kind."""
    return COLORS[index % len(COLORS)]


def arrays(**columns: Any) -> dict[str, Column]:
    return {name: np.asarray(column) for name, column in columns.items()}


def group_ticks(labels: Sequence[str], groups: Sequence[str], max_labels: int) -> dict[float, str]:
    """Ticks at 0, 1, 2, …: `labels`, or where they are more than `max_labels`, one for each group."""
    if len(labels) <= max_labels:
        return {float(place): label for place, label in enumerate(labels)}
    places: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    return {float(np.mean(found)): f"{group} ×{len(found)}" for group, found in places.items()}
