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
from agents.rules.parts import Trim, check_trim, check_update_times, make_sum
from agents.timing.nanoseconds import from_seconds


@dataclass(frozen=True)
class FedFix(Rule):
    """Aggregate at every tick; ticks are Δt of device time apart (Fraboni et al., 4.4):

        w ← w + η_g Σ_{i∈S} d_i Δ_i,   d_i = ⌈τ_i/Δt⌉ p_i

    S has the updates that have arrived since the last tick. Updates that arrive at the instant of this
    tick count, too. The senders of these updates wait for the tick and get the new w. The other clients
    continue to train. A tick without updates leaves w and its version unchanged. With Δt ≥ max τ_i, the
    rule is synchronous FedAvg. The p_i are the importances in the whole run, even if only some clients
    are present.

    A client that joins, for the first time or again, gets w immediately. Updates of a client that leaves
    still count at the next tick.

    If `update_times` is not set, ⌈τ_i/Δt⌉ is replaced by the number of ticks from the dispatch of a
    model to the application of its update. The server keeps only the running sum.
    """

    paper: ClassVar[str] = "Fraboni, Vidal, Kameni, Lorenzi 2023, arXiv 2206.10189 (section 4.4)"
    equation: ClassVar[str] = "every Δt: w ← w + η_g Σ_{i∈S} d_i Δ_i,   d_i = ⌈τ_i/Δt⌉ p_i"

    period: Annotated[float, "s"]
    """Δt: time between ticks."""
    update_times: tuple[Annotated[float, "s"], ...] | None = None
    """Update time τ of every device, in device order; None if ticks are counted during the run."""
    server_lr: float = 1.0
    """η_g, the server's step size."""
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates whose values are removed at each end of every coordinate: the lowest and the
    highest values. This protects against a few attackers. 0: nothing is removed. `median`: only the
    middle one or two values are left (Yin et al. 2018, arXiv 1803.01498)."""

    def __post_init__(self) -> None:
        duration("period", self.period)
        positive("server_lr", self.server_lr)
        check_update_times(self.update_times)
        check_trim(self.trim)

    def check(self, clients: int) -> None:
        check_update_times(self.update_times, clients)

    def ticks(self, update_time: float) -> int:
        """Return ⌈τ/Δt⌉, at least 1. The result is computed in whole nanoseconds, so that 0.3 s are
        exactly 3 × 0.1 s."""
        return max(1, -(-from_seconds(update_time) // from_seconds(self.period)))

    def begin(self, server: Server) -> FedFixState:
        return FedFixState(self, server)


class FedFixState(State):
    """The server half. A present client is training, or waits for the tick."""

    def __init__(self, params: FedFix, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = make_sum(server, params.trim)
        self._waiting: set[str] = set()
        self._period = from_seconds(params.period)
        self._ticks = 0
        self._configured: dict[str, int] | None = None
        """⌈τ/Δt⌉ of every client, from `update_times`; None if ticks are counted during the run."""
        if params.update_times is not None:
            ticks = map(params.ticks, params.update_times)
            self._configured = dict(zip(server.population, ticks, strict=True))

    def start(self) -> Actions:
        self._ticks = self.server.began // self._period
        return [*super().start(), SetPeriodicTimer("tick", self._period)]

    def update(self, update: Update) -> Actions:
        client = update.client
        configured = self._configured
        ticks = self._count_ticks(update) if configured is None else configured[client]
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
        receivers = self.server.in_device_order(self._waiting)
        self._waiting.clear()
        return [self._sum.apply(), *(Send(client, deferred=True) for client in receivers)]

    def _count_ticks(self, update: Update) -> int:
        """Ticks after the dispatch of the model, with the next one of the run. One at the instant of the
        dispatch does not count."""
        return max(1, self._ticks + 1 - update.dispatched // self._period)
