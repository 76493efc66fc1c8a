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
    Request,
    Rule,
    Send,
    Server,
    SetTimer,
    State,
    Sums,
    Update,
)
from agents.rules.parts import Trim, Workers, check_trim, gathered, training_at_once


@dataclass(frozen=True)
class Port(Rule):
    """At `min_updates` deltas, and more where stale clients have to be waited for:

        w ← w + η_g Σ ω_i Δ_i,   Σ ω_i = 1
        ω_i ∝ n_i·(μ·(1 + cos(w − w_b, Δ_i))/2 + λ·S/(τ_i + S))

    with n_i the samples of client i, w_b the model it trained from, and cos 1 where τ ≤ 1, 0 where a
    vector is zero. While a client trains from a model more than S versions old, the aggregation waits
    for its update; with `urgent`, the client is asked to send what it has. μ, λ and S are by default
    those of Plato, its authors' framework; that always takes the model of two versions ago for w_b.

    The contributors then get the new w or, with `concurrency` below the number of clients, as many as
    there is room for, drawn uniformly among the idle. A client that joins, for the first time or again,
    gets w at once or, with `concurrency`, is idle. What a client has handed in stays in the buffer, also
    if it leaves; nobody waits for it any more. Where nobody trains, the aggregation takes what there is.
    """

    paper: ClassVar[str] = "Su & Li 2022, How Asynchronous can Federated Learning Be?, IEEE/ACM IWQoS"
    equation: ClassVar[str] = (
        "w ← w + Σ ω_i Δ_i,   ω_i ∝ n_i·(μ·(1 + cos(w − w_b, Δ_i))/2 + λ·S/(τ_i + S))"
    )

    min_updates: int = 15
    """Updates that an aggregation takes at least."""
    urgent: bool = True
    """Whether stale clients are asked for what they have, instead of waited for until they finish."""
    similarity_weight: float = 1.0
    """μ."""
    staleness_weight: float = 3.0
    """λ."""
    staleness_bound: int = 10
    """S, in versions."""
    concurrency: int | None = None
    """Clients that train at once; None for all."""
    server_lr: float = 1.0
    """η_g."""
    trim: Annotated[Trim, "share to trim"] = 0.0
    """Share of the updates that is left out at each end of every coordinate, so that few attackers
    cannot move it far; or `median` (Yin et al. 2018, arXiv 1803.01498)."""

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
                "wait for the aggregation: it would never come"
            )

    def sums(self) -> Sums:
        raise ValueError("it weights each update by its direction")

    def begin(self, server: Server) -> PortState:
        return PortState(self, server)


class PortState(State):
    """The model does not change while updates are gathered. So the weight of an update, up to the common
    factor 1/Σ, is known when it arrives, and a running sum is enough."""

    def __init__(self, params: Port, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = gathered(server, params.trim)
        self._workers = Workers(server, params.concurrency)
        self._deferred: set[str] = set()
        """Those whose model leaves when this instant is over, and is that of then."""
        self._interrupted: set[str] = set()
        self.models: dict[int, Vector] = {}
        """Former versions, from the oldest that a client trains from on."""

    def start(self) -> Actions:
        return self._give_work(self.server.clients)

    def update(self, update: Update) -> Actions:
        self._sum.add(update, update.samples * self._factor(update))
        self._forget(update.client)
        self._workers.waiting.add(update.client)
        return self._aggregate_if_ready()

    def join(self, client: str) -> Actions:
        return self._give_work([client])

    def leave(self, client: str) -> Actions:
        self._forget(client)
        return [*self._give_work(), *self._aggregate_if_ready()]

    def timer(self, name: str) -> Actions:
        self._deferred.clear()
        return []

    def _forget(self, client: str) -> None:
        self._workers.discard(client)
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
        """Clients that left may leave too few for `min_updates`: aggregate what there is."""
        training = self._workers.training
        enough = len(self._sum) >= self.params.min_updates or not training
        if not enough or not self._sum:
            return []
        oldest = self.server.version - self.params.staleness_bound
        stale = [client for client, version in training.items() if version < oldest]
        if not stale:
            return self._aggregate()
        if not self.params.urgent:
            return []
        requests = [Request(client, "interrupt") for client in stale if client not in self._interrupted]
        self._interrupted.update(stale)
        return list(requests)

    def _aggregate(self) -> list[Action]:
        self._keep_model()
        aggregated = self._sum.apply(self.params.server_lr / self._sum.weight)
        self._workers.training |= dict.fromkeys(self._deferred, self.server.version)
        self._workers.release()
        return [aggregated, *self._give_work(deferred=True)]

    def _keep_model(self) -> None:
        """Before w changes: all versions from the oldest that is trained from on."""
        training = self._workers.training
        oldest = min(training.values(), default=self.server.version + 1)
        self.models = {version: w for version, w in self.models.items() if version >= oldest}
        if training:
            self.models[self.server.version] = self.server.w.copy()

    def _give_work(self, newly_idle: Iterable[str] = (), *, deferred: bool = False) -> list[Action]:
        """Send the model to the idle, as many as may train at once."""
        self._workers.add_idle(newly_idle)
        chosen = self._workers.assign()
        sends: list[Action] = [Send(client, deferred=deferred) for client in chosen]
        if not deferred or not chosen:
            return sends
        self._deferred.update(chosen)
        return [*sends, SetTimer("sent", 0)]  # timers are the last that happens before they leave


def _cosine(a: Vector, b: Vector) -> float:
    """Of the angle between `a` and `b`, shape (d,); 0 where one of them has no direction."""
    norms = math.sqrt(_dot(a, a) * _dot(b, b))
    return _dot(a, b) / norms if norms else 0.0


def _dot(a: Vector, b: Vector) -> float:
    """In float64: squares of float32 may overflow."""
    return float(np.einsum("i,i", a, b, dtype=np.float64))
