"""FedFix (Fraboni, Vidal, Kameni, Lorenzi 2023, arXiv 2206.10189)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from agents.checks import duration, positive
from agents.nanoseconds import from_seconds
from agents.rules.interface import (
    Action,
    Actions,
    Aggregated,
    Contribution,
    Rule,
    Send,
    Server,
    SetPeriodicTimer,
    State,
    Update,
)
from agents.vectors import add_scaled

_TICK = "tick"


@dataclass(frozen=True)
class FedFix(Rule):
    """At every tick, Δt of device time after the last (Fraboni et al., 4.4):

        w ← w + η_g Σ_{i∈S} d_i Δ_i,   d_i = ⌈τ_i/Δt⌉ p_i

    S holds the updates that arrived since the last tick, those at its very instant included. Their
    senders wait for the tick and get the new w; the others train on. A tick without updates leaves w
    and its version as they are. Δt ≥ max τ_i is synchronous FedAvg, over those that are present.

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

    def __post_init__(self) -> None:
        duration("period", self.period)
        positive("server_lr", self.server_lr)
        if self.update_times is not None and not all(time > 0 for time in self.update_times):
            raise ValueError("update_times must all be longer than 0 s")

    def check(self, clients: int) -> None:
        if self.update_times is not None and len(self.update_times) != clients:
            raise ValueError(
                f"update_times has {len(self.update_times)} entries, expected {clients}: one per client"
            )

    def ticks(self, update_time: float) -> int:
        """⌈τ/Δt⌉, of whole nanoseconds: 0.3 s are three periods of 0.1 s."""
        return max(1, -(-from_seconds(update_time) // from_seconds(self.period)))

    def begin(self, server: Server) -> FedFixState:
        return FedFixState(self, server)


class FedFixState(State):
    """A present client is training, or waits for the tick."""

    def __init__(self, params: FedFix, server: Server) -> None:
        self._params = params
        self._server = server
        self._sum = np.zeros_like(server.w)
        self._arrived: list[Contribution] = []
        self._waiting: set[str] = set()
        self._now = 0
        """Ticks so far."""
        self._sent: dict[str, int] = {}
        """Ticks at the last dispatch to each client."""
        self._given: dict[str, int] | None = None
        if params.update_times is not None:
            ticks = map(params.ticks, params.update_times)
            self._given = dict(zip(server.population, ticks, strict=True))

    def start(self) -> Actions:
        tick = SetPeriodicTimer(_TICK, from_seconds(self._params.period))
        return [*self._send(list(self._server.clients)), tick]

    def update(self, update: Update) -> Actions:
        client = update.client
        ticks = self._now + 1 - self._sent[client] if self._given is None else self._given[client]
        weight = self._params.server_lr * ticks * self._server.clients[client]
        add_scaled(self._sum, update.vector, weight)
        self._arrived.append(update.contribution(weight))
        self._waiting.add(client)
        return []

    def join(self, client: str) -> Actions:
        return self._send([client])

    def leave(self, client: str) -> Actions:
        self._waiting.discard(client)
        return []

    def timer(self, name: str) -> Actions:
        self._now += 1
        return self._aggregate()

    def _aggregate(self) -> list[Action]:
        if not self._arrived:
            return [Aggregated(self._server.version, ())]
        add_scaled(self._server.w, self._sum, 1.0)
        self._sum[:] = 0
        aggregated = self._server.aggregated(self._arrived)
        self._arrived = []
        receivers = [client for client in self._server.clients if client in self._waiting]
        self._waiting.clear()
        return [aggregated, *self._send(receivers, deferred=True)]

    def _send(self, clients: list[str], *, deferred: bool = False) -> list[Action]:
        self._sent |= dict.fromkeys(clients, self._now)
        return [Send(client, deferred=deferred) for client in clients]
