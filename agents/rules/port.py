"""Port (Su & Li 2022, "How Asynchronous can Federated Learning Be?", IEEE/ACM IWQoS)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from agents.checks import at_least, positive
from agents.models.vectors import Vector
from agents.rules.interface import (
    Action,
    Actions,
    RequestUpdate,
    Rule,
    Send,
    Server,
    SetTimer,
    State,
    Sums,
    Update,
)
from agents.rules.parts import ClientPool, Trim, check_trim, make_sum, training_at_once


@dataclass(frozen=True)
class Port(Rule):
    """Aggregate when `min_updates` deltas have arrived and no stale client is training:

        w ← w + η_g Σ ω_i Δ_i,   Σ ω_i = 1
        ω_i ∝ n_i·(μ·(1 + cos(w − w_b, Δ_i))/2 + λ·S/(τ_i + S))

    n_i is the number of samples of client i, w_b the model that client i trained from, and τ_i the
    staleness of its update. cos is 1 if τ_i ≤ 1, and 0 if one of the vectors is zero. While a client
    trains from a model more than S versions old, the aggregation waits for its update; with `urgent`,
    the client is asked to send its result so far. The defaults of μ, λ and S are those of Plato, the
    framework of the authors. Plato always uses the model of two versions ago as w_b.

    The contributors then get the new w. With `concurrency` below the number of clients, the new w goes
    to idle clients, up to the limit. By default, they are drawn uniformly. A client that joins,
    for the first time or again, gets w immediately; with `concurrency`, it becomes idle. Updates of a
    client that leaves stay in the buffer, but the aggregation does not wait for that client any more. If
    no client trains, the updates in the buffer are aggregated.
    """

    paper: ClassVar[str] = "Su & Li 2022, How Asynchronous can Federated Learning Be?, IEEE/ACM IWQoS"
    equation: ClassVar[str] = (
        "w ← w + Σ ω_i Δ_i,   ω_i ∝ n_i·(μ·(1 + cos(w − w_b, Δ_i))/2 + λ·S/(τ_i + S))"
    )

    min_updates: int = 15
    """Minimum number of updates per aggregation."""
    urgent: bool = True
    """Whether stale clients are asked to send their result so far. If false, the server waits until the
    stale clients have finished."""
    similarity_weight: float = 1.0
    """μ: weight of the similarity between the update and the recent change of the model."""
    staleness_weight: float = 3.0
    """λ: weight of the term S/(τ + S), which is larger for fresher updates."""
    staleness_bound: int = 10
    """S, staleness bound in versions. The aggregation waits for a client that trains from a model more
    than S versions old."""
    concurrency: int | None = None
    """Number of clients that train at the same time; None for all clients."""
    server_lr: float = 1.0
    """η_g, the server's step size."""
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates whose values are removed at each end of every coordinate: the lowest and the
    highest values. This protects against a few attackers. 0: nothing is removed. `median`: only the
    middle one or two values are left (Yin et al. 2018, arXiv 1803.01498)."""

    def __post_init__(self) -> None:
        for name in ("min_updates", "staleness_bound", "concurrency"):
            at_least(name, getattr(self, name), 1)
        for name in ("staleness_weight", "server_lr"):
            positive(name, getattr(self, name))
        at_least("similarity_weight", self.similarity_weight, 0)
        check_trim(self.trim, self.min_updates)

    def check(self, clients: int) -> None:
        training = training_at_once(clients, self.concurrency)
        if self.min_updates > training:
            raise ValueError(
                f"min_updates is {self.min_updates}, but only {training} clients train at once and "
                f"wait for the aggregation: use at most {training}"
            )

    def sums(self) -> Sums:
        raise ValueError("the weight of an update depends on its direction")

    @property
    def draws(self) -> bool:
        return self.concurrency is not None

    def begin(self, server: Server) -> PortState:
        return PortState(self, server)


class PortState(State):
    """The server half. The model does not change while updates are collected. So the weight of an update
    is known on arrival, except for a factor that all updates have in common, and a running sum is
    enough."""

    def __init__(self, params: Port, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = make_sum(server, params.trim)
        self._pool = ClientPool(server, params.concurrency)
        self._deferred: set[str] = set()
        """Clients to which the model is sent at the end of this instant, in the version that is then
        current."""
        self._interrupted: set[str] = set()
        """Training clients that were asked to send their result so far."""
        self.models: dict[int, Vector] = {}
        """Previous models by version, shape (d,), from the oldest that a client trains from."""

    def start(self) -> Actions:
        return self._give_work(self.server.clients)

    def update(self, update: Update) -> Actions:
        self._sum.add(update, update.samples * self._factor(update))
        self._forget(update.client)
        self._pool.waiting.add(update.client)
        return self._aggregate_if_ready()

    def join(self, client: str) -> Actions:
        return self._give_work([client])

    def leave(self, client: str) -> Actions:
        self._forget(client)
        return [*self._give_work(), *self._aggregate_if_ready()]

    def lose_work(self, client: str) -> Actions:
        self._forget(client)
        return [*self._give_work([client], deferred=True), *self._aggregate_if_ready()]

    def redraw(self) -> Actions:
        return self._give_work()

    def timer(self, name: str) -> Actions:
        self._deferred.clear()
        return []

    def _forget(self, client: str) -> None:
        self._pool.discard(client)
        self._deferred.discard(client)
        self._interrupted.discard(client)

    def _factor(self, update: Update) -> float:
        """μ·(1 + cos)/2 + λ·S/(τ + S), above 0."""
        params, staleness = self.params, self.server.staleness(update)
        cosine = 1.0
        if staleness > 1:
            cosine = _cosine(self.server.w - self.models[update.base_version], update.vector)
        bound = params.staleness_bound
        similarity = params.similarity_weight * (1 + cosine) / 2
        return similarity + params.staleness_weight * bound / (staleness + bound)

    def _aggregate_if_ready(self) -> list[Action]:
        """Aggregate if enough updates have arrived and no stale client trains. With `urgent`, interrupt
        stale clients. If no client trains any more, aggregate even fewer than `min_updates` updates."""
        training = self._pool.training
        enough = len(self._sum) >= self.params.min_updates or not training
        if not enough or not self._sum:
            return []
        oldest = self.server.version - self.params.staleness_bound
        stale = [client for client, version in training.items() if version < oldest]
        if not stale:
            return self._aggregate()
        if not self.params.urgent:
            return []
        requests = [
            RequestUpdate(client, "interrupt") for client in stale if client not in self._interrupted
        ]
        self._interrupted.update(stale)
        return list(requests)

    def _aggregate(self) -> list[Action]:
        self._keep_model()
        aggregated = self._sum.apply(self.params.server_lr / self._sum.weight)
        self._pool.training |= dict.fromkeys(self._deferred, self.server.version)
        self._pool.release()
        return [aggregated, *self._give_work(deferred=True)]

    def _keep_model(self) -> None:
        """Save w before it changes. Discard versions older than all that clients train from."""
        training = self._pool.training
        oldest = min(training.values(), default=self.server.version + 1)
        self.models = {version: w for version, w in self.models.items() if version >= oldest}
        if training:
            self.models[self.server.version] = self.server.w.copy()

    def _give_work(self, newly_idle: Iterable[str] = (), *, deferred: bool = False) -> list[Action]:
        """Make `newly_idle` idle, then send the model to as many idle clients as may train. `deferred`:
        see `Send`."""
        self._pool.add_idle(newly_idle)
        chosen = self._pool.assign()
        sends: list[Action] = [Send(client, deferred=deferred) for client in chosen]
        if not deferred or not chosen:
            return sends
        self._deferred.update(chosen)
        return [*sends, SetTimer("sent", 0)]  # fires last in an instant, before deferred models


def _cosine(a: Vector, b: Vector) -> float:
    """Cosine of the angle, shape (d,); 0 if a vector is zero."""
    norms = math.sqrt(_dot(a, a) * _dot(b, b))
    return _dot(a, b) / norms if norms else 0.0


def _dot(a: Vector, b: Vector) -> float:
    """Return the dot product, summed in float64 because squares of float32 values may overflow."""
    return float(np.einsum("i,i", a, b, dtype=np.float64))
