"""DeFedAvg for non-IID data (Wang, Li, Jin, Zhang 2024, arXiv 2402.11198)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from agents.checks import at_least, positive
from agents.rules.interface import (
    Action,
    Actions,
    Aggregated,
    Broadcast,
    ClientSide,
    Ignored,
    Request,
    Rule,
    Send,
    Server,
    State,
    Update,
)
from agents.rules.parts import Trim, check_trim, gathered


@dataclass(frozen=True)
class DeFedAvgNiid(Rule):
    """A round draws n clients uniformly with replacement, pulls one update of each of them, however
    stale, and waits for these (Wang et al., Algorithm 1):

        w ← w + η_g (1/n) Σ m_i Δ_i

    for a client that was drawn m_i times. Then w is broadcast to all, and the next round draws. Clients
    train on the newest model that they got, never twice on one, and leave the result in a send buffer.
    So a fast client counts no more often than a slow one. A drawn client that leaves is dropped: the
    round is then as if it had drawn fewer, and one that loses all is one in which w stays. A client that
    joins, for the first time or again, gets w at once, and may be drawn from the next round on.
    """

    paper: ClassVar[str] = "Wang, Li, Jin, Zhang 2024, arXiv 2402.11198 (Algorithm 1)"
    equation: ClassVar[str] = "w ← w + η_g (1/n) Σ m_i Δ_i"

    sample: int
    """n: draws per round."""
    send_buffer: Literal["overwrite", "hold"] = "overwrite"
    """A client whose update nobody has fetched goes on training and replaces it, or trains anew only
    once it was fetched."""
    server_lr: float = 1.0
    """η_g."""
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates that is left out at each end of every coordinate, so that few attackers
    cannot move it far; or `median` (Yin et al. 2018, arXiv 1803.01498)."""

    def __post_init__(self) -> None:
        at_least("sample", self.sample, 1)
        positive("server_lr", self.server_lr)
        check_trim(self.trim, self.sample)

    @property
    def client_side(self) -> ClientSide:
        return ClientSide(send_buffer=self.send_buffer)

    def begin(self, server: Server) -> DeFedAvgNiidState:
        return DeFedAvgNiidState(self, server)


class DeFedAvgNiidState(State):
    """One round after the other."""

    def __init__(self, params: DeFedAvgNiid, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = gathered(server, params.trim)
        """With how often each client was drawn as its weight."""
        self._waiting: dict[str, int] = {}
        """How often each client was drawn whose update is still to come."""

    def start(self) -> Actions:
        return [Broadcast(), *self._draw()]

    def update(self, update: Update) -> Actions:
        times = self._waiting.pop(update.client, 0)
        if not times:
            # Its send buffer is empty now: a later request is to find something to wait for.
            return [Ignored("not asked for in this round"), Send(update.client)]
        self._sum.add(update, times=times)
        return self._end_round_if_complete()

    def join(self, client: str) -> Actions:
        return [Send(client), *([] if self._waiting else self._draw())]

    def leave(self, client: str) -> Actions:
        return self._end_round_if_complete() if self._waiting.pop(client, 0) else []

    def _end_round_if_complete(self) -> Actions:
        if self._waiting:
            return []
        if not self._sum:  # all left: a round without contributions, in which w stays
            return [Aggregated(self.server.version, ()), *self._draw()]
        aggregated = self._sum.apply(self.params.server_lr / self._sum.weight)
        return [aggregated, Broadcast(), *self._draw()]

    def _draw(self) -> list[Action]:
        clients = list(self.server.clients)
        if not clients:
            return []
        drawn = self.server.rng.integers(len(clients), size=self.params.sample)
        indices, times = np.unique(drawn, return_counts=True)
        self._waiting = {clients[i]: int(m) for i, m in zip(indices, times, strict=True)}
        return [Request(client, "pull") for client in self._waiting]
