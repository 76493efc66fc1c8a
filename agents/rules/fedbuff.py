"""FedBuff (Nguyen et al. 2022, arXiv 2106.06639; Toghani & Uribe 2022, arXiv 2210.01161)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from agents.checks import at_least, positive
from agents.rules.idle import Idle
from agents.rules.interface import Actions, Contribution, Rule, Send, Server, State, Update
from agents.vectors import add_scaled


@dataclass(frozen=True)
class FedBuff(Rule):
    """Deltas are summed in a buffer; at K of them (Toghani & Uribe, Algorithms 1-2, with β = η_g/K):

        w ← w + (η_g/K) Σ s(τ_i) Δ_i

    s: `none` 1 (Toghani & Uribe) or `inverse_sqrt` 1/√(1+τ) (Nguyen et al.). K = 1 is vanilla
    asynchronous FL. The server keeps the running sum only, never the single updates.

    The uploader reads the current w at once (`reply: immediate`; the K-th reads the new one), or the
    contributors of a buffer get the new w (`after_aggregation`; Fraboni et al. 2023, 4.5). With
    `concurrency` below the number of clients, whoever uploads is replaced by one drawn uniformly among
    the idle, itself included: each at once, or in blocks of K after the aggregation (Xu et al., 5.3).

    A client that joins, for the first time or again, gets w at once or, with `concurrency`, is idle.
    What a client has handed in stays in the buffer, also if it leaves; where nobody trains and some wait
    for the aggregation, it takes what there is.
    """

    paper: ClassVar[str] = "Nguyen et al. 2022, arXiv 2106.06639; Toghani & Uribe 2022, arXiv 2210.01161"
    equation: ClassVar[str] = "w ← w + (η_g/K) Σ s(τ_i) Δ_i"

    buffer_size: int = 10
    """K."""
    server_lr: float = 1.0
    """η_g."""
    staleness: Literal["none", "inverse_sqrt"] = "none"
    reply: Literal["immediate", "after_aggregation"] = "immediate"
    concurrency: int | None = None
    """Clients that train at once; None for all."""
    replace: Literal["each", "block"] = "each"

    def __post_init__(self) -> None:
        positive("server_lr", self.server_lr)
        at_least("buffer_size", self.buffer_size, 1)
        at_least("concurrency", self.concurrency, 1)
        if self.replace == "block" and self.concurrency is None:
            raise ValueError("replace: block needs `concurrency`: how many clients train at once")

    @property
    def replies_at_once(self) -> bool:
        return self.reply == "immediate" and self.replace == "each"

    def check(self, clients: int) -> None:
        if self.concurrency is not None and self.concurrency > clients:
            raise ValueError(f"concurrency is {self.concurrency}, but there are only {clients} clients")
        training = self.concurrency or clients
        if not self.replies_at_once and self.buffer_size > training:
            raise ValueError(
                f"buffer_size is {self.buffer_size}, but only {training} clients train at once and "
                "wait for the aggregation: the buffer would never fill"
            )

    def discount(self, staleness: int) -> float:
        """s(τ), in (0, 1]."""
        return 1.0 if self.staleness == "none" else 1 / math.sqrt(1 + staleness)

    def begin(self, server: Server) -> FedBuffState:
        return FedBuffState(self, server)


class FedBuffState(State):
    """A present client is training, waiting for the aggregation it contributed to, or idle."""

    def __init__(self, params: FedBuff, server: Server) -> None:
        self._params = params
        self._server = server
        self._sum = np.zeros_like(server.w)
        self._buffer: list[Contribution] = []
        self._training: set[str] = set()
        self._waiting: set[str] = set()
        self._idle = Idle()

    def start(self) -> Actions:
        return self._give_work(self._server.clients)

    def update(self, update: Update) -> Actions:
        discount = self._params.discount(self._server.staleness(update))
        add_scaled(self._sum, update.vector, discount)
        self._buffer.append(update.contribution(discount))
        self._training.discard(update.client)
        (self._idle if self._params.replies_at_once else self._waiting).add(update.client)
        return self._aggregate() if len(self._buffer) >= self._params.buffer_size else self._go_on()

    def join(self, client: str) -> Actions:
        return self._give_work([client])

    def leave(self, client: str) -> Actions:
        for clients in (self._training, self._waiting, self._idle):
            clients.discard(client)
        return self._go_on()

    def _go_on(self) -> Actions:
        """Clients that left may leave too few to fill the buffer: aggregate what there is."""
        sent = self._give_work()
        return self._aggregate() if self._waiting and not self._training else sent

    def _aggregate(self) -> Actions:
        scale = self._params.server_lr / self._params.buffer_size
        add_scaled(self._server.w, self._sum, scale)
        self._sum[:] = 0
        aggregated = self._server.aggregated(self._buffer, scale)
        self._buffer = []
        waited = [c for c in self._server.clients if c in self._waiting] if self._waiting else []
        self._waiting.clear()
        return [aggregated, *self._give_work(waited, deferred=not self._params.replies_at_once)]

    def _give_work(self, newly_idle: Iterable[str] = (), *, deferred: bool = False) -> Actions:
        """Send the model to the idle, as many as may train at once."""
        for client in newly_idle:
            self._idle.add(client)
        if self._params.concurrency is None:
            chosen = self._idle.take_all()
        else:
            room = self._params.concurrency - len(self._training) - len(self._waiting)
            chosen = self._idle.draw(room, self._server.rng)
        self._training.update(chosen)
        return [Send(client, deferred=deferred) for client in chosen]
