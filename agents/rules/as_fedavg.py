"""AS-FedAvg, an asynchronous baseline (Iakovidou, Kim 2024, arXiv 2405.10123)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from agents.checks import at_least, positive
from agents.models.vectors import mix
from agents.rules.interface import (
    Action,
    Actions,
    ClientSide,
    Contribution,
    Rule,
    Send,
    Server,
    SetTimer,
    State,
    Sums,
    SumUp,
    Update,
)


@dataclass(frozen=True)
class AsFedAvg(Rule):
    """After every Δ-th arrival, aggregate the Δ models received since the last aggregation (Iakovidou &
    Kim, section 5):

        w ← (1 − η_g) w + η_g (1/Δ) Σ w_i

    The paper has η_g = 1. Every sender gets w as it was before the aggregation of its model. This holds
    for the Δ-th sender, too: the paper does not specify which w this sender gets. The server keeps only
    the running mean.

    A client that joins, for the first time or again, gets w immediately. Models of a client that leaves
    stay in the mean.
    """

    paper: ClassVar[str] = "Iakovidou, Kim 2024, arXiv 2405.10123 (section 5)"
    equation: ClassVar[str] = "w ← (1/Δ) Σ w_i"

    every: int
    """Δ, number of models per aggregation."""
    server_lr: float = 1.0
    """η_g, the server's step size."""

    def __post_init__(self) -> None:
        at_least("every", self.every, 1)
        positive("server_lr", self.server_lr)

    @property
    def client_side(self) -> ClientSide:
        return ClientSide("model")

    def sums(self) -> Sums:
        if self.every < 2:
            raise ValueError(
                f"every is {self.every}, but the sum of one update reveals it: use at least 2"
            )
        return Sums(self.every)

    def begin(self, server: Server) -> AsFedAvgState:
        return AsFedAvgState(self, server)


class AsFedAvgState(State):
    """The server half. The Δ-th sender must get the old w, but actions are carried out only after the
    rule has returned. So the aggregation is delayed until a timer of 0 s expires or the next event
    arrives."""

    def __init__(self, params: AsFedAvg, server: Server) -> None:
        self.params, self.server = params, server
        self._mean = np.empty_like(server.w)
        self._arrived: list[Contribution] = []

    def update(self, update: Update) -> Actions:
        actions = [*self._aggregate_if_due(), Send(update.client)]
        self._arrived.append(update.contribution(self.params.server_lr / self.params.every))
        mix(self._mean, update.vector, 1 / len(self._arrived))
        return [*actions, SetTimer("aggregate", 0)] if self._due else actions

    def join(self, client: str) -> Actions:
        return [*self._aggregate_if_due(), Send(client)]

    def timer(self, name: str) -> Actions:
        return self._aggregate_if_due()

    @property
    def _due(self) -> bool:
        return len(self._arrived) == self.params.every

    def _aggregate_if_due(self) -> list[Action]:
        if not self._due:
            return []
        used, self._arrived = self._arrived, []
        share = self.params.server_lr
        if self.server.sums_only:  # the mean is then taken over the models that training started from
            contributions = tuple(replace(contribution, weight=1.0) for contribution in used)
            return [SumUp(contributions, share / self.params.every, share, self._mean.copy())]
        mix(self.server.w, self._mean, share)
        return [self.server.aggregated(used)]
