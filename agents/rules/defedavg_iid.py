"""DeFedAvg for IID data (Wang, Li, Jin, Zhang 2024, arXiv 2402.11198)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar

from agents.checks import at_least, positive
from agents.rules.interface import Action, Actions, Broadcast, Rule, Server, State, Update
from agents.rules.parts import Trim, check_trim, gathered


@dataclass(frozen=True)
class DeFedAvgIid(Rule):
    """A round takes the first n clients whose updates arrive, however stale (Wang et al., Algorithm 2):

        w ← w + η_g (1/n) Σ Δ_i

    Then w is broadcast to all; each client trains anew from the newest model that it got, never twice on
    one. A round takes a client once: its second update waits for the next. Where fewer than n clients
    are left, a round ends once it has all of these, with the mean over them.

    A client that joins, for the first time or again, gets w at once. What a client has handed in counts,
    also if it leaves.
    """

    paper: ClassVar[str] = "Wang, Li, Jin, Zhang 2024, arXiv 2402.11198 (Algorithm 2)"
    equation: ClassVar[str] = "w ← w + η_g (1/n) Σ Δ_i"

    buffer_size: int
    """n."""
    server_lr: float = 1.0
    """η_g."""
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates that is left out at each end of every coordinate, so that few attackers
    cannot move it far; or `median` (Yin et al. 2018, arXiv 1803.01498)."""

    def __post_init__(self) -> None:
        at_least("buffer_size", self.buffer_size, 1)
        positive("server_lr", self.server_lr)
        check_trim(self.trim, self.buffer_size)

    def check(self, clients: int) -> None:
        if self.buffer_size > clients:
            raise ValueError(
                f"buffer_size is {self.buffer_size}, but there are only {clients} clients and a round "
                "takes each of them once"
            )

    def begin(self, server: Server) -> DeFedAvgIidState:
        return DeFedAvgIidState(self, server)


class DeFedAvgIidState(State):
    def __init__(self, params: DeFedAvgIid, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = gathered(server, params.trim)
        self._round: set[str] = set()
        """The clients whose updates are in it."""
        self._held: list[Update] = []
        """Further updates of clients that the round has already, in order."""

    def start(self) -> Actions:
        return [Broadcast()]

    def update(self, update: Update) -> Actions:
        if update.client in self._round:
            self._held.append(dataclasses.replace(update, vector=update.vector.copy()))
            return []
        self._take(update)
        return self._end_complete_rounds()

    def leave(self, client: str) -> Actions:
        return self._end_complete_rounds()

    def _take(self, update: Update) -> None:
        self._sum.add(update)
        self._round.add(update.client)

    def _end_complete_rounds(self) -> Actions:
        """What was held may complete the next round at once."""
        actions: list[Action] = []
        while self._complete():
            actions += [self._sum.apply(self.params.server_lr / len(self._sum)), Broadcast()]
            self._round.clear()
            held, self._held = self._held, []
            for update in held:
                if update.client in self._round:
                    self._held.append(update)
                else:
                    self._take(update)
        return actions

    def _complete(self) -> bool:
        nobody_else = self._round and self.server.clients.keys() <= self._round
        return len(self._round) >= self.params.buffer_size or bool(nobody_else)
