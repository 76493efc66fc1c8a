"""Selection in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agents.selection.interface import ClientSelection, Draw, ServerView


@dataclass(frozen=True)
class RoundRobin(ClientSelection):
    """Clients take turns: those whose last turn was the longest ago are chosen, clients without a turn
    first. Among clients without a turn, the first in device order is chosen."""

    def choose(self, draw: Draw, view: ServerView, rng: np.random.Generator) -> Sequence[str]:
        turns: dict[str, int] = view.memory.setdefault("turns", {})
        order = {client: index for index, client in enumerate(view.clients)}
        ranked = sorted(draw.idle, key=lambda client: (turns.get(client, 0), order[client]))
        chosen, last = ranked[: draw.count], max(turns.values(), default=0)
        turns |= {client: last + turn for turn, client in enumerate(chosen, 1)}
        return chosen
