"""What a chart is before it is drawn: layers of columns, two axes. Knows no run, no drawing library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]
Mark = Literal["line", "step", "points", "bars", "spans", "rules", "diagonal"]
"""What a layer is drawn as, and the columns that it needs:

`line`, `step` (constant to the right of each point), `points`: `x`, `y`.
`bars`: `x` (middle), `y`, and `width`; perhaps `low` and `high`, the ends of an interval of confidence.
`spans`: `y` (middle), `height`, `begin`, `end`, `color` (index in `PALETTE`): rectangles; perhaps
`shade`, how much of the colour, from 0 to 1.
`rules`: `x`, `label`: vertical lines, each with a few words.
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
"""Told apart by the colour-blind, and seen on white and on black: Okabe and Ito's colours, but for
black, which is a middle grey, and yellow, which is darker."""
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
    ticks: Mapping[float, str] | None = None
    """Where names stand in place of numbers."""
    limits: tuple[float | None, float | None] = (None, None)

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True, slots=True)
class Layer:
    """One series. Its name is its identity: new data of the same name takes the place of the old."""

    name: str
    mark: Mark
    columns: Mapping[str, Column]
    color: str = "blue"
    _: KW_ONLY
    """Of `PALETTE`."""
    legend: bool = True
    words: str = ""
    """In the legend; its name where there are none."""
    dashed: bool = False
    hover: Mapping[str, str] = field(default_factory=dict)
    """What is told of one point: words, and the name of the column (`$name`: the layer's)."""

    def __post_init__(self) -> None:
        if len({len(column) for column in self.columns.values()}) > 1:
            raise ValueError(f"columns of {self.name!r} differ in length")
        unknown = {name for name in self.hover.values() if name[0] != "$"} - self.columns.keys()
        if unknown:
            raise ValueError(f"{self.name!r} is to tell of columns that it lacks: {sorted(unknown)}")


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    layers: tuple[Layer, ...]
    _: KW_ONLY
    legend: Mapping[str, str] = field(default_factory=dict)
    """Words for colours, where layers have several (`spans`)."""
    note: str = ""
    """What a reader must know of it, below the title."""
    height: float = 1.0
    """In times of the usual one."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to see but marks."""
        drawn = [layer for layer in self.layers if layer.mark not in ("rules", "diagonal")]
        return not any(len(column) for layer in drawn for column in layer.columns.values())

    def noted(self, *words: str) -> Chart:
        """With `words` added to its note."""
        return replace(self, note="; ".join(filter(None, (self.note, *words))))


def color(index: int) -> str:
    """The colour of the `index`-th of several equal series."""
    return COLORS[index % len(COLORS)]


def arrays(**columns: Any) -> dict[str, Column]:
    return {name: np.asarray(column) for name, column in columns.items()}


def group_ticks(labels: Sequence[str], groups: Sequence[str], most: int) -> dict[float, str]:
    """Names at 0, 1, 2, …: of devices, or where there are more than `most`, of their groups."""
    if len(labels) <= most:
        return {float(place): label for place, label in enumerate(labels)}
    places: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    return {float(np.mean(found)): f"{group} ×{len(found)}" for group, found in places.items()}
