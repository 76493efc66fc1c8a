"""Power-of-choice (Cho, Wang, Joshi 2020, arXiv 2010.01243)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agents.config import Count
from agents.selection.interface import ClientSelection, Draw, ServerView, by_weight


@dataclass(frozen=True)
class PowerOfChoice(ClientSelection):
    """Draw `candidates` idle clients with probabilities proportional to their importance, and choose
    those of them with the highest loss. The paper asks the candidates for their loss on the current
    model; here it is the last training loss that each of them reported (its variant rpow-d). A client
    that has not reported a loss yet goes first."""

    paper: ClassVar[str] = "Cho, Wang, Joshi 2020, arXiv 2010.01243"

    candidates: Count = 4
    """d, number of candidates; at least the number of clients that the rule wants."""

    @property
    def needs_loss(self) -> bool:
        return True

    def choose(self, draw: Draw, view: ServerView, rng: np.random.Generator) -> Sequence[str]:
        importance = [view.clients[client].importance for client in draw.idle]
        drawn = by_weight(draw.idle, importance, max(self.candidates, draw.count), rng)

        def loss(client: str) -> float:
            last = view.clients[client].loss
            return math.inf if last is None else last

        return sorted(drawn, key=loss, reverse=True)[: draw.count]
