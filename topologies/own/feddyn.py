"""FedDyn (Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama 2021, arXiv 2111.04263)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agents.checks import at_least
from agents.config import Count, Positive
from agents.models.vectors import add_scaled
from agents.rules.interface import (
    Actions,
    Answer,
    ClientHalf,
    ClientSettings,
    ClientSide,
    Ignored,
    LocalResult,
    Rule,
    Send,
    Server,
    State,
    Terms,
    Update,
    Vectors,
)
from agents.rules.parts import WeightedSum
from agents.wire.payloads import ModelMessage


@dataclass(frozen=True)
class FedDyn(Rule):
    """In each round the server sends the model θ to the clients P: all, or `sample` of them, drawn
    uniformly. Client k trains from θ by its local steps on

        f_k(w) − ⟨v_k, w⟩ + (α/2) ‖w − θ‖²

    sends the difference Δ_k = θ_k − θ of its end point θ_k, and keeps v_k ← v_k − α Δ_k, the gradient of
    f_k at θ_k. When all of P have answered, with m clients in the run:

        h ← h − (α/m) Σ Δ_k
        θ ← θ + (1/|P|) Σ Δ_k − h/α

    h and all v_k begin with 0. A client that leaves is dropped from its round; one that joins takes part
    from the next round on.
    """

    paper: ClassVar[str] = "Acar et al. 2021, arXiv 2111.04263"
    equation: ClassVar[str] = "θ ← θ + (1/|P|) Σ Δ_k − h/α,   h ← h − (α/m) Σ Δ_k"

    alpha: Positive = 0.1
    """α."""
    sample: Count | None = None
    """Number of clients per round; None for all clients."""

    def check(self, clients: int) -> None:
        at_least("the number of clients", clients, self.sample or 1)

    @property
    def client_side(self) -> ClientSide:
        return ClientSide("delta", memory={"gradient": "model"}, adds_terms=True)

    def begin(self, server: Server) -> FedDynState:
        return FedDynState(self, server)

    def begin_client(self, settings: ClientSettings) -> FedDynClient:
        return FedDynClient(self.client_side, settings, self.alpha)


class FedDynClient(ClientHalf):
    """The client half."""

    def __init__(self, side: ClientSide, settings: ClientSettings, alpha: float) -> None:
        super().__init__(side, settings)
        self.alpha = alpha

    def terms(self, model: ModelMessage, memory: Vectors) -> Terms:
        gradient = memory.get("gradient")
        return Terms(linear=None if gradient is None else -gradient, proximal=self.alpha)

    def answer(self, result: LocalResult) -> Answer:
        change = result.end - result.model.vector
        gradient = result.memory.get("gradient", np.zeros_like(change))
        return Answer(memory={"gradient": gradient - np.float32(self.alpha) * change})


class FedDynState(State):
    """The server half: one round after the other."""

    def __init__(self, params: FedDyn, server: Server) -> None:
        self.params, self.server = params, server
        self.h = np.zeros_like(server.w)
        self.updates = WeightedSum(server)
        self.waiting: set[str] = set()

    def start(self) -> Actions:
        return self.new_round()

    def update(self, update: Update) -> Actions:
        if update.client not in self.waiting or self.server.staleness(update):
            return [Ignored("late: its round is over")]
        self.updates.add(update)
        return self.answered(update.client)

    def join(self, client: str) -> Actions:
        return [] if self.waiting else self.new_round()

    def leave(self, client: str) -> Actions:
        return self.answered(client) if client in self.waiting else []

    def answered(self, client: str) -> Actions:
        self.waiting.remove(client)
        if self.waiting:
            return []
        if not self.updates:  # all clients of the round have left
            return self.new_round()
        alpha = self.params.alpha
        add_scaled(self.h, self.updates.vector, -alpha / len(self.server.population))
        version = self.updates.apply(1 / len(self.updates))
        add_scaled(self.server.w, self.h, -1 / alpha)
        return [version, *self.new_round()]

    def new_round(self) -> Actions:
        clients = list(self.server.clients)
        count = min(self.params.sample or len(clients), len(clients))
        drawn = [clients[k] for k in self.server.rng.choice(len(clients), count, replace=False)]
        self.waiting = set(drawn)
        return [Send(c, deferred=True) for c in self.server.in_device_order(drawn)]
