"""Selection by battery level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from agents.checks import duration
from agents.selection.interface import ClientSelection, ClientView, Draw, ServerView, by_weight


@dataclass(frozen=True)
class Charged(ClientSelection):
    """Clients whose battery is below `minimum` are not eligible. The others are drawn uniformly, or with
    a probability proportional to their level. Devices with a battery report their level with each
    update. A client that has not reported a level since it joined counts as fully charged."""

    minimum: Annotated[float, "share"] = 0.2
    """Lowest level at which a client is eligible, from 0 to 1."""
    weight: Literal["uniform", "level"] = "uniform"
    """Probability of eligible clients. `uniform`: equal. `level`: proportional to the level."""
    recheck: Annotated[float, "s"] | None = 600.0
    """Time after its last report from which a client is eligible at any level, because it may have been
    charged meanwhile; null if only a new report makes it eligible."""

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= 1:
            raise ValueError(f"minimum is {self.minimum:g}, expected from 0 to 1")
        duration("recheck", self.recheck)

    @property
    def needs_battery(self) -> bool:
        return True

    def eligible(self, idle: Sequence[str], view: ServerView) -> Sequence[str]:
        return [client for client in idle if self._is_charged(view.clients[client], view.at)]

    def choose(self, draw: Draw, view: ServerView, rng: np.random.Generator) -> Sequence[str]:
        if self.weight == "uniform":
            return draw.uniform(rng)
        return by_weight(draw.idle, [_level(view.clients[c]) for c in draw.idle], draw.count, rng)

    def _is_charged(self, seen: ClientView, now: float) -> bool:
        if _level(seen) >= self.minimum:
            return True
        return self.recheck is not None and now - seen.battery_at >= self.recheck


def _level(seen: ClientView) -> float:
    return 1.0 if seen.battery is None else seen.battery
