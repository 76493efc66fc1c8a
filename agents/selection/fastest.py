"""Selection of the fastest clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from agents.selection.interface import ClientSelection, Draw, ServerView


@dataclass(frozen=True)
class Fastest(ClientSelection):
    """The clients with the shortest mean duration of a round are chosen. A client that no draw has
    chosen yet goes first, so that each client is measured once. A client that was chosen and has never
    answered goes last. Of equally fast clients, the first in device order is chosen."""

    explore: Annotated[float, "share"] = 0.0
    """Probability that a place goes to a client drawn uniformly instead. With 0, a client that was slow
    once is not measured again while faster ones are idle."""

    def __post_init__(self) -> None:
        if not 0 <= self.explore <= 1:
            raise ValueError(f"explore is {self.explore:g}, expected from 0 to 1")

    def choose(self, draw: Draw, view: ServerView, rng: np.random.Generator) -> Sequence[str]:
        order = {client: index for index, client in enumerate(view.clients)}

        def key(client: str) -> tuple[int, float, int]:
            seen = view.clients[client]
            if seen.mean_duration is None:
                return (2 if seen.chosen else 0), 0.0, order[client]
            return 1, seen.mean_duration, order[client]

        ranked = sorted(draw.idle, key=key)
        chosen: list[str] = []
        while ranked and len(chosen) < draw.count:
            by_chance = self.explore and rng.random() < self.explore
            chosen.append(ranked.pop(int(rng.integers(len(ranked))) if by_chance else 0))
        return chosen
