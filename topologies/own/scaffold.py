"""SCAFFOLD (Karimireddy et al. 2020, arXiv 1910.06378), Algorithm 1 with option II."""

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
    Lengths,
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
class Scaffold(Rule):
    """In each round the server sends the model x and its control variate c to the clients S: all, or
    `sample` of them, drawn uniformly. Client i makes K local steps of size η from y = x, with its own
    control variate c_i:

        y ← y − η (g_i(y) − c_i + c)
        c_i⁺ = c_i − c + (x − y)/(K η)

    It sends Δy_i = y − x and Δc_i = c_i⁺ − c_i, and keeps c_i⁺ as its new c_i. When all of S have
    answered, with N clients in the run:

        x ← x + (η_g/|S|) Σ Δy_i
        c ← c + (1/N) Σ Δc_i

    c and all c_i begin with 0. A client that leaves is dropped from its round; one that joins takes part
    from the next round on. The formula of c_i⁺ needs plain SGD: use no momentum.
    """

    paper: ClassVar[str] = "Karimireddy et al. 2020, arXiv 1910.06378"
    equation: ClassVar[str] = "x ← x + (η_g/|S|) Σ Δy_i,   c ← c + (1/N) Σ Δc_i"

    sample: Count | None = None
    """Number of clients per round; None for all clients."""
    server_lr: Positive = 1.0
    """η_g."""

    def check(self, clients: int) -> None:
        at_least("the number of clients", clients, self.sample or 1)

    @property
    def client_side(self) -> ClientSide:
        control: Lengths = {"control": "model"}  # a vector as long as the model
        return ClientSide(
            "delta", model_vectors=control, update_vectors=control, memory=control, adds_terms=True
        )

    def begin(self, server: Server) -> ScaffoldState:
        return ScaffoldState(self, server)

    def begin_client(self, settings: ClientSettings) -> ScaffoldClient:
        return ScaffoldClient(self.client_side, settings)


class ScaffoldClient(ClientHalf):
    """The client half."""

    def terms(self, model: ModelMessage, memory: Vectors) -> Terms:
        return Terms(linear=model.vectors["control"] - memory.get("control", np.float32(0)))

    def answer(self, result: LocalResult) -> Answer:
        own = result.memory.get("control", np.zeros_like(result.end))
        mean_step = (result.model.vector - result.end) / np.float32(result.lr_sum or 1)
        control = own - result.model.vectors["control"] + mean_step
        return Answer(vectors={"control": control - own}, memory={"control": control})


class ScaffoldState(State):
    """The server half: one round after the other."""

    def __init__(self, params: Scaffold, server: Server) -> None:
        self.params, self.server = params, server
        self.control = np.zeros_like(server.w)
        self.updates, self.controls = WeightedSum(server), np.zeros_like(server.w)
        self.waiting: set[str] = set()

    def start(self) -> Actions:
        return self.new_round()

    def update(self, update: Update) -> Actions:
        if update.client not in self.waiting or self.server.staleness(update):
            return [Ignored("late: its round is over")]
        self.updates.add(update)
        add_scaled(self.controls, update.vectors["control"], 1.0)
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
        add_scaled(self.control, self.controls, 1 / len(self.server.population))
        self.controls.fill(0)
        version = self.updates.apply(self.params.server_lr / len(self.updates))
        return [version, *self.new_round()]

    def new_round(self) -> Actions:
        clients = list(self.server.clients)
        count = min(self.params.sample or len(clients), len(clients))
        drawn = [clients[k] for k in self.server.rng.choice(len(clients), count, replace=False)]
        self.waiting = set(drawn)
        vectors = {"control": self.control}
        return [Send(c, deferred=True, vectors=vectors) for c in self.server.in_device_order(drawn)]
