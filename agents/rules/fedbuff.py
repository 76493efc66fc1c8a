"""FedBuff (Nguyen et al. 2022, arXiv 2106.06639; Toghani & Uribe 2022, arXiv 2210.01161)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from agents.checks import at_least, positive
from agents.rules.interface import Actions, Rule, Send, Server, State, Sums, Update
from agents.rules.parts import ClientPool, MaskedSum, Trim, check_trim, make_sum, training_at_once


@dataclass(frozen=True)
class FedBuff(Rule):
    """Sum the deltas in a buffer, and aggregate when the buffer has K deltas (Toghani & Uribe,
    Algorithms 1-2, with β = η_g/K):

        w ← w + (η_g/K) Σ s(τ_i) Δ_i

    `staleness` chooses s: 1 for `none` (Toghani & Uribe), 1/√(1+τ) for `inverse_sqrt` (Nguyen et al.). K
    = 1 is vanilla asynchronous FL. The server keeps only the running sum, never the single updates.

    With `reply: immediate`, the sender of an update gets the current w immediately. For the K-th sender,
    this is already the new w. With `reply: after_aggregation`, the contributors of a buffer get the new
    w (Fraboni et al. 2023, 4.5). With `concurrency` below the number of clients, the sender becomes
    idle, and a client drawn among the idle ones trains next. By default, the draw is uniform.
    With `replace: each`, a client is drawn after each upload; with `replace: block`, K clients are drawn
    after each aggregation (Xu et al., 5.3).

    A client that joins, for the first time or again, gets w immediately; with `concurrency`, it becomes
    idle. Updates of a client that leaves stay in the buffer. If no client trains and some clients wait
    for the aggregation, because fewer than K clients are left, the updates in the buffer are aggregated,
    and K is their number.
    """

    paper: ClassVar[str] = "Nguyen et al. 2022, arXiv 2106.06639; Toghani & Uribe 2022, arXiv 2210.01161"
    equation: ClassVar[str] = "w ← w + (η_g/K) Σ s(τ_i) Δ_i"

    assumes_uniform: ClassVar[str] = (
        "the replacement of clients in Xu et al. 2024, 5.3, draws them uniformly"
    )

    buffer_size: int = 10
    """K, number of updates per aggregation."""
    server_lr: float = 1.0
    """η_g, the server's step size."""
    staleness: Literal["none", "inverse_sqrt"] = "none"
    """Formula for s. `none`: 1. `inverse_sqrt`: 1/√(1+τ)."""
    reply: Literal["immediate", "after_aggregation"] = "immediate"
    """Time at which the sender of an update gets the next model. `immediate`: when its update arrives.
    `after_aggregation`: when its update was aggregated."""
    concurrency: int | None = None
    """Number of clients that train at the same time; None for all clients."""
    replace: Literal["each", "block"] = "each"
    """How idle clients are drawn if `concurrency` is set. `each`: one client after each upload. `block`:
    K clients after each aggregation."""
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates whose values are removed at each end of every coordinate: the lowest and the
    highest values. This protects against a few attackers. 0: nothing is removed. `median`: only the
    middle one or two values are left (Yin et al. 2018, arXiv 1803.01498)."""

    def __post_init__(self) -> None:
        positive("server_lr", self.server_lr)
        at_least("buffer_size", self.buffer_size, 1)
        at_least("concurrency", self.concurrency, 1)
        if self.replace == "block" and self.concurrency is None:
            raise ValueError("replace: block needs `concurrency`, the number of training clients")
        check_trim(self.trim, self.buffer_size)

    @property
    def replies_at_once(self) -> bool:
        """Whether a client gets a model immediately when an update arrives: the sender, or the client
        that is drawn next."""
        return self.reply == "immediate" and self.replace == "each"

    def check(self, clients: int) -> None:
        training = training_at_once(clients, self.concurrency)
        if not self.replies_at_once and self.buffer_size > training:
            raise ValueError(
                f"buffer_size is {self.buffer_size}, but only {training} clients train at once and "
                f"wait for the aggregation, so the buffer would never fill: use at most {training}"
            )

    def sums(self) -> Sums:
        if self.trim:
            raise ValueError(f"trim {self.trim} needs the single updates: remove it")
        if not self.replies_at_once:
            raise ValueError(
                "clients get models while a buffer is being opened: set reply: immediate and "
                "replace: each"
            )
        if self.buffer_size < 2:
            raise ValueError(
                f"buffer_size is {self.buffer_size}, but the sum of one update reveals it: "
                "use at least 2"
            )
        return Sums(self.buffer_size, weighted=self.staleness != "none")

    def discount(self, staleness: int) -> float:
        """Return s(τ), which is in (0, 1]."""
        return 1.0 if self.staleness == "none" else 1 / math.sqrt(1 + staleness)

    @property
    def draws(self) -> bool:
        return self.concurrency is not None

    def begin(self, server: Server) -> FedBuffState:
        return FedBuffState(self, server)


class FedBuffState(State):
    """The server half: the buffer and the clients that train."""

    def __init__(self, params: FedBuff, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = MaskedSum() if server.sums_only else make_sum(server, params.trim)
        self._pool = ClientPool(server, params.concurrency)

    def start(self) -> Actions:
        return self._give_work(self.server.clients)

    def update(self, update: Update) -> Actions:
        self._sum.add(update, self.params.discount(self.server.staleness(update)))
        self._pool.training.pop(update.client, None)
        if self.params.replies_at_once:
            self._pool.add_idle([update.client])
        else:
            self._pool.waiting.add(update.client)
        return self._aggregate() if len(self._sum) >= self.params.buffer_size else self._continue()

    def join(self, client: str) -> Actions:
        return self._give_work([client])

    def leave(self, client: str) -> Actions:
        self._pool.discard(client)
        return self._continue()

    def lose_work(self, client: str) -> Actions:
        self._pool.discard(client)
        return self._give_work([client])

    def redraw(self) -> Actions:
        return self._continue()

    def _continue(self) -> Actions:
        """Send models to idle clients. If no client trains any more because clients have left, aggregate
        the buffer."""
        sent = self._give_work()
        return self._aggregate() if self._pool.waiting and not self._pool.training else sent

    def _aggregate(self) -> Actions:
        aggregated = self._sum.apply(self.params.server_lr / len(self._sum))
        self._pool.release()
        return [aggregated, *self._give_work(deferred=not self.params.replies_at_once)]

    def _give_work(self, newly_idle: Iterable[str] = (), *, deferred: bool = False) -> Actions:
        """Make `newly_idle` idle, then send the model to as many idle clients as may train. `deferred`:
        see `Send`."""
        self._pool.add_idle(newly_idle)
        return [Send(client, deferred=deferred) for client in self._pool.assign()]
