"""FedFix (Fraboni, Vidal, Kameni, Lorenzi 2023, arXiv 2206.10189)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from agents.checks import duration, positive
from agents.rules.interface import (
    Actions,
    Aggregated,
    Rule,
    Send,
    Server,
    SetPeriodicTimer,
    State,
    Update,
)
from agents.rules.parts import Trim, check_trim, check_update_times, gathered
from agents.timing.nanoseconds import from_seconds


@dataclass(frozen=True)
class FedFix(Rule):
    """At every tick, Δt of device time after the last (Fraboni et al., 4.4):

        w ← w + η_g Σ_{i∈S} d_i Δ_i,   d_i = ⌈τ_i/Δt⌉ p_i

    S holds the updates that arrived since the last tick, those at its very instant included. Their
    senders wait for the tick and get the new w; the others train on. A tick without updates leaves w
    and its version as they are. Δt ≥ max τ_i is synchronous FedAvg. The p_i are those of the whole run,
    whoever is present.

    A client that joins, for the first time or again, gets w at once. What a client has handed in counts
    at the next tick, also if it leaves before.

    Where `update_times` are not given, ⌈τ_i/Δt⌉ is counted: the ticks from the dispatch of a model to
    the application of its update. The server keeps the running sum only.
    """

    paper: ClassVar[str] = "Fraboni, Vidal, Kameni, Lorenzi 2023, arXiv 2206.10189 (section 4.4)"
    equation: ClassVar[str] = "every Δt: w ← w + η_g Σ_{i∈S} d_i Δ_i,   d_i = ⌈τ_i/Δt⌉ p_i"

    period: Annotated[float, "s"]
    """Δt."""
    update_times: tuple[Annotated[float, "s"], ...] | None = None
    """τ of every device, in device order; None to count ticks."""
    server_lr: float = 1.0
    """η_g."""
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates that is left out at each end of every coordinate, so that few attackers
    cannot move it far; or `median` (Yin et al. 2018, arXiv 1803.01498)."""

    def __post_init__(self) -> None:
        duration("period", self.period)
        positive("server_lr", self.server_lr)
        check_update_times(self.update_times)
        check_trim(self.trim)

    def check(self, clients: int) -> None:
        check_update_times(self.update_times, clients)

    def ticks(self, update_time: float) -> int:
        """⌈τ/Δt⌉, of whole nanoseconds: 0.3 s are three periods of 0.1 s."""
        return max(1, -(-from_seconds(update_time) // from_seconds(self.period)))

    def begin(self, server: Server) -> FedFixState:
        return FedFixState(self, server)


class FedFixState(State):
    """A present client is training, or waits for the tick."""

    def __init__(self, params: FedFix, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = gathered(server, params.trim)
        self._waiting: set[str] = set()
        self._period = from_seconds(params.period)
        self._ticks = 0
        """Of the run, so far."""
        self._given: dict[str, int] | None = None
        if params.update_times is not None:
            ticks = map(params.ticks, params.update_times)
            self._given = dict(zip(server.population, ticks, strict=True))

    def start(self) -> Actions:
        self._ticks = self.server.began // self._period
        return [*super().start(), SetPeriodicTimer("tick", self._period)]

    def update(self, update: Update) -> Actions:
        client = update.client
        ticks = self._counted(update) if self._given is None else self._given[client]
        self._sum.add(update, self.params.server_lr * ticks * self.server.clients[client])
        self._waiting.add(client)
        return []

    def leave(self, client: str) -> Actions:
        self._waiting.discard(client)
        return []

    def timer(self, name: str) -> Actions:
        self._ticks += 1
        if not self._sum:
            return [Aggregated(self.server.version, ())]
        receivers = self.server.in_order(self._waiting)
        self._waiting.clear()
        return [self._sum.apply(), *(Send(client, deferred=True) for client in receivers)]

    def _counted(self, update: Update) -> int:
        """Ticks from the dispatch of its model to the next one; the tick at the dispatch is over."""
        return max(1, self._ticks + 1 - update.dispatched // self._period)
