"""FedBuff (Nguyen et al. 2022, arXiv 2106.06639; Toghani & Uribe 2022, arXiv 2210.01161)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from agents.checks import at_least, positive
from agents.rules.interface import Actions, Rule, Send, Server, State, Sums, Update
from agents.rules.parts import MaskedSum, Trim, Workers, check_trim, gathered, training_at_once


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
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates that is left out at each end of every coordinate, so that few attackers
    cannot move it far; or `median` (Yin et al. 2018, arXiv 1803.01498)."""

    def __post_init__(self) -> None:
        positive("server_lr", self.server_lr)
        at_least("buffer_size", self.buffer_size, 1)
        at_least("concurrency", self.concurrency, 1)
        if self.replace == "block" and self.concurrency is None:
            raise ValueError("replace: block needs `concurrency`: how many clients train at once")
        check_trim(self.trim, self.buffer_size)

    @property
    def replies_at_once(self) -> bool:
        return self.reply == "immediate" and self.replace == "each"

    def check(self, clients: int) -> None:
        training = training_at_once(clients, self.concurrency)
        if not self.replies_at_once and self.buffer_size > training:
            raise ValueError(
                f"buffer_size is {self.buffer_size}, but only {training} clients train at once and "
                "wait for the aggregation: the buffer would never fill"
            )

    def sums(self) -> Sums:
        if self.trim:
            raise ValueError("trim sorts the single updates: remove it")
        if not self.replies_at_once:
            raise ValueError(
                "the server goes on while a buffer is being opened: take reply: immediate and "
                "replace: each"
            )
        if self.buffer_size < 2:
            raise ValueError("a sum of one update is that update: take a buffer_size of 2 or more")
        return Sums(self.buffer_size, weighted=self.staleness != "none")

    def discount(self, staleness: int) -> float:
        """s(τ), in (0, 1]."""
        return 1.0 if self.staleness == "none" else 1 / math.sqrt(1 + staleness)

    def begin(self, server: Server) -> FedBuffState:
        return FedBuffState(self, server)


class FedBuffState(State):
    def __init__(self, params: FedBuff, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = MaskedSum() if server.masked else gathered(server, params.trim)
        self._workers = Workers(server, params.concurrency)

    def start(self) -> Actions:
        return self._give_work(self.server.clients)

    def update(self, update: Update) -> Actions:
        self._sum.add(update, self.params.discount(self.server.staleness(update)))
        self._workers.training.pop(update.client, None)
        if self.params.replies_at_once:
            self._workers.add_idle([update.client])
        else:
            self._workers.waiting.add(update.client)
        return self._aggregate() if len(self._sum) >= self.params.buffer_size else self._go_on()

    def join(self, client: str) -> Actions:
        return self._give_work([client])

    def leave(self, client: str) -> Actions:
        self._workers.discard(client)
        return self._go_on()

    def _go_on(self) -> Actions:
        """Clients that left may leave too few to fill the buffer: aggregate what there is."""
        sent = self._give_work()
        return self._aggregate() if self._workers.waiting and not self._workers.training else sent

    def _aggregate(self) -> Actions:
        aggregated = self._sum.apply(self.params.server_lr / self.params.buffer_size)
        self._workers.release()
        return [aggregated, *self._give_work(deferred=not self.params.replies_at_once)]

    def _give_work(self, newly_idle: Iterable[str] = (), *, deferred: bool = False) -> Actions:
        """Send the model to the idle, as many as may train at once."""
        self._workers.add_idle(newly_idle)
        return [Send(client, deferred=deferred) for client in self._workers.assign()]
