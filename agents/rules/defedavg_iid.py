"""DeFedAvg for IID data (Wang, Li, Jin, Zhang 2024, arXiv 2402.11198)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar

from agents.checks import at_least, positive
from agents.rules.interface import Action, Actions, Broadcast, Rule, Server, State, Update
from agents.rules.parts import Trim, check_trim, make_sum


@dataclass(frozen=True)
class DeFedAvgIid(Rule):
    """Aggregate, in each round, the first n updates that arrive from different clients (Wang et al.,
    Algorithm 2):

        w ← w + η_g (1/n) Σ Δ_i

    Stale updates count like others. After the aggregation, w is broadcast to all clients. A client
    trains on the newest model received, never twice on the same one. A second update of the same client
    waits for the next round. If fewer than n clients are present, the round ends when all of them have
    contributed. The updates are then divided by their number instead of n.

    A client that joins, for the first time or again, gets w immediately. Updates of a client that leaves
    still count.
    """

    paper: ClassVar[str] = "Wang, Li, Jin, Zhang 2024, arXiv 2402.11198 (Algorithm 2)"
    equation: ClassVar[str] = "w ← w + η_g (1/n) Σ Δ_i"

    buffer_size: int
    """n, number of updates per round."""
    server_lr: float = 1.0
    """η_g, the server's step size."""
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates whose values are removed at each end of every coordinate: the lowest and the
    highest values. This protects against a few attackers. 0: nothing is removed. `median`: only the
    middle one or two values are left (Yin et al. 2018, arXiv 1803.01498)."""

    def __post_init__(self) -> None:
        at_least("buffer_size", self.buffer_size, 1)
        positive("server_lr", self.server_lr)
        check_trim(self.trim, self.buffer_size)

    def check(self, clients: int) -> None:
        if self.buffer_size > clients:
            raise ValueError(
                f"buffer_size is {self.buffer_size}, but there are only {clients} clients and a round "
                f"takes at most one update from each: use at most {clients}"
            )

    def begin(self, server: Server) -> DeFedAvgIidState:
        return DeFedAvgIidState(self, server)


class DeFedAvgIidState(State):
    """The server half: one round after the other."""

    def __init__(self, params: DeFedAvgIid, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = make_sum(server, params.trim)
        self._round: set[str] = set()
        """Clients whose updates are in the sum."""
        self._held: list[Update] = []
        """Updates of clients that already have one in this round, in order of arrival; they wait for the
        next."""

    def start(self) -> Actions:
        return [Broadcast()]

    def update(self, update: Update) -> Actions:
        if update.client in self._round:
            self._held.append(dataclasses.replace(update, vector=update.vector.copy()))
            return []
        self._add_to_round(update)
        return self._end_complete_rounds()

    def leave(self, client: str) -> Actions:
        return self._end_complete_rounds()

    def _add_to_round(self, update: Update) -> None:
        self._sum.add(update)
        self._round.add(update.client)

    def _end_complete_rounds(self) -> Actions:
        """Updates that waited for the next round may complete that one, too."""
        actions: list[Action] = []
        while self._is_complete():
            actions += [self._sum.apply(self.params.server_lr / len(self._sum)), Broadcast()]
            self._round.clear()
            held, self._held = self._held, []
            for update in held:
                if update.client in self._round:
                    self._held.append(update)
                else:
                    self._add_to_round(update)
        return actions

    def _is_complete(self) -> bool:
        nobody_else = self._round and self.server.clients.keys() <= self._round
        return len(self._round) >= self.params.buffer_size or bool(nobody_else)
