"""DeFedAvg for non-IID data (Wang, Li, Jin, Zhang 2024, arXiv 2402.11198)."""

from __future__ import annotations

from collections import Counter
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
    RequestUpdate,
    Rule,
    Send,
    Server,
    State,
    Update,
)
from agents.rules.parts import Trim, check_trim, make_sum


@dataclass(frozen=True)
class DeFedAvgNiid(Rule):
    """Draw n clients in each round, uniformly with replacement, pull one update from each of them, and
    wait for all of these updates (Wang et al., Algorithm 1):

        w ← w + η_g (1/n) Σ m_i Δ_i

    m_i is the number of times that client i was drawn. Stale updates count like others. After the
    aggregation, w is broadcast to all clients, and the next round starts. Clients train on the newest
    model received, never twice on the same one, and put the result into a send buffer. So a fast client
    counts no more often than a slow one.

    A drawn client that leaves, or whose update is rejected, is dropped from the round, and n is reduced
    by its draws. If all drawn clients are dropped, w is unchanged. A client that joins, for the first
    time or again, gets w immediately and may be drawn from the next round on.
    """

    paper: ClassVar[str] = "Wang, Li, Jin, Zhang 2024, arXiv 2402.11198 (Algorithm 1)"
    equation: ClassVar[str] = "w ← w + η_g (1/n) Σ m_i Δ_i"

    assumes_uniform: ClassVar[str] = "Algorithm 1 of Wang et al. 2024 draws uniformly with replacement"

    sample: int
    """n, number of draws per round."""
    send_buffer: Literal["overwrite", "hold"] = "overwrite"
    """Behaviour of a client whose update waits in the send buffer. `overwrite`: train on the next model
    and replace the update. `hold`: train again only after the server has pulled the update."""
    server_lr: float = 1.0
    """η_g, the server's step size."""
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates whose values are removed at each end of every coordinate: the lowest and the
    highest values. This protects against a few attackers. 0: nothing is removed. `median`: only the
    middle one or two values are left (Yin et al. 2018, arXiv 1803.01498)."""

    def __post_init__(self) -> None:
        at_least("sample", self.sample, 1)
        positive("server_lr", self.server_lr)
        check_trim(self.trim, self.sample)

    @property
    def client_side(self) -> ClientSide:
        return ClientSide(send_buffer=self.send_buffer)

    @property
    def draws(self) -> bool:
        return True

    def begin(self, server: Server) -> DeFedAvgNiidState:
        return DeFedAvgNiidState(self, server)


class DeFedAvgNiidState(State):
    """The server half: one round after the other."""

    def __init__(self, params: DeFedAvgNiid, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = make_sum(server, params.trim)
        """Weight of an update: the number of times that its client was drawn."""
        self._waiting: dict[str, int] = {}
        """Drawn clients whose update has not arrived, with the number of times."""

    def start(self) -> Actions:
        return [Broadcast(), *self._draw()]

    def update(self, update: Update) -> Actions:
        times = self._waiting.pop(update.client, 0)
        if not times:
            # The client's send buffer is now empty. Without a new training, a later request would wait
            # forever.
            return [Ignored("not asked for in this round"), Send(update.client)]
        self._sum.add(update, times=times)
        return self._end_round_if_complete()

    def join(self, client: str) -> Actions:
        return [Send(client), *([] if self._waiting else self._draw())]

    def leave(self, client: str) -> Actions:
        return self._end_round_if_complete() if self._waiting.pop(client, 0) else []

    def redraw(self) -> Actions:
        return [] if self._waiting else self._draw()

    def _end_round_if_complete(self) -> Actions:
        if self._waiting:
            return []
        if not self._sum:  # all clients left: a round without contributions, w is unchanged
            return [Aggregated(self.server.version, ()), *self._draw()]
        aggregated = self._sum.apply(self.params.server_lr / self._sum.weight)
        return [aggregated, Broadcast(), *self._draw()]

    def _draw(self) -> list[Action]:
        clients = list(self.server.clients)
        if not clients:
            return []

        def uniformly(rng: np.random.Generator) -> list[str]:
            return [clients[i] for i in rng.integers(len(clients), size=self.params.sample)]

        drawn = Counter(self.server.draw(clients, self.params.sample, uniformly, replacement=True))
        self._waiting = {client: drawn[client] for client in clients if client in drawn}
        return [RequestUpdate(client, "pull") for client in self._waiting]
