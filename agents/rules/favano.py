"""FAVANO, also FAVAS (Leconte, Nguyen, Moulines 2023, arXiv 2305.16099)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from agents.checks import at_least, duration, positive
from agents.models.vectors import Vector, add_scaled
from agents.rules.client_half import Form
from agents.rules.interface import (
    Action,
    Actions,
    Aggregated,
    ClientSettings,
    ClientSide,
    ClientState,
    Ignored,
    RequestUpdate,
    Rule,
    Send,
    Server,
    SetPeriodicTimer,
    State,
    Update,
)
from agents.rules.parts import WeightedSum
from agents.timing.nanoseconds import from_seconds
from agents.wire.payloads import ModelMessage


@dataclass(frozen=True)
class Favano(Rule):
    """Every `period`, draw s clients uniformly without replacement and interrupt their training:

        w ← (1 − η_g) w + η_g (w + Σ ŵ_i)/(s + 1),   ŵ_i = w_b + (w_i − w_b)/α_i

    w_b is the model that client i trained from, and α_i the typical number of local steps of client i
    (see `debias`). Because of the division by α_i, a fast client does not move w further than a slow
    one. The paper has η_g = 1. The drawn clients get the new w. The others continue up to their number
    of local steps K, then wait until they are drawn.

    If a round takes longer than a period, the next one starts immediately after it; rounds do not
    overlap. A drawn client that leaves, or whose update is rejected, is dropped and s is reduced by one;
    with s = 0, w is unchanged. A client that joins, for the first time or again, gets w immediately, and
    may be drawn in the next round.
    """

    paper: ClassVar[str] = "Leconte, Nguyen, Moulines 2023, arXiv 2305.16099"
    equation: ClassVar[str] = "w ← (w + Σ ŵ_i)/(s + 1),   ŵ_i = w_b + (w_i − w_b)/α_i"

    assumes_uniform: ClassVar[str] = "the rounds of Leconte et al. 2023 draw clients uniformly"

    period: Annotated[float, "s"]
    """Time between rounds."""
    sample: int
    """s, number of clients per round."""
    debias: Literal["stochastic", "deterministic"] = "stochastic"
    """Formula for α_i. `stochastic`: P(E_i > 0)·min(E_i, K). `deterministic`: E[min(E_i, K)]. E_i is the
    number of local steps that are done when the training is interrupted, K the configured number."""
    server_lr: float = 1.0
    """η_g, the server's step size."""

    def __post_init__(self) -> None:
        duration("period", self.period)
        at_least("sample", self.sample, 1)
        positive("server_lr", self.server_lr)

    @property
    def client_side(self) -> ClientSide:
        return ClientSide("model", send_buffer="hold")

    def check(self, clients: int) -> None:
        if self.sample > clients:
            raise ValueError(
                f"sample is {self.sample}, but there are only {clients} clients to draw from"
            )

    @property
    def draws(self) -> bool:
        return True

    def begin(self, server: Server) -> FavanoState:
        return FavanoState(self, server)

    def begin_client(self, settings: ClientSettings) -> FavanoClient:
        return FavanoClient(self, settings)


class FavanoState(State):
    """The server half: one round per period."""

    def __init__(self, params: Favano, server: Server) -> None:
        self.params, self.server = params, server
        self._sum = WeightedSum(server)
        """Σ (ŵ_i − w) over the updates of the round, during which w does not change."""
        self._waiting: set[str] = set()
        """Drawn clients whose update has not arrived."""
        self._overdue = False
        """A period ended during the current round."""

    def start(self) -> Actions:
        return [*super().start(), SetPeriodicTimer("round", from_seconds(self.params.period))]

    def update(self, update: Update) -> Actions:
        if update.client not in self._waiting:
            # The client's send buffer is now empty. Without a new training, a later request would wait
            # forever.
            return [Ignored("not asked for in this round"), Send(update.client)]
        self._waiting.remove(update.client)
        self._sum.add(update)
        add_scaled(self._sum.vector, self.server.w, -1.0)
        return self._end_round_if_complete()

    def leave(self, client: str) -> Actions:
        if client not in self._waiting:
            return []
        self._waiting.remove(client)
        return self._end_round_if_complete()

    def timer(self, name: str) -> Actions:
        if self._waiting:
            self._overdue = True
            return []
        return self._draw()

    def _end_round_if_complete(self) -> Actions:
        if self._waiting:
            return []
        # If all drawn clients left, the round has no contributions, and w is unchanged.
        actions = self._aggregate() if self._sum else [Aggregated(self.server.version, ())]
        if self._overdue:
            self._overdue = False
            actions += self._draw()
        return actions

    def _aggregate(self) -> list[Action]:
        aggregated = self._sum.apply(self.params.server_lr / (len(self._sum) + 1))
        drawn = {contribution.client for contribution in aggregated.contributions}
        return [aggregated, *(Send(c, deferred=True) for c in self.server.in_device_order(drawn))]

    def _draw(self) -> list[Action]:
        clients = list(self.server.clients)
        if not clients:
            return [Aggregated(self.server.version, ())]
        sample = min(self.params.sample, len(clients))

        def uniformly(rng: np.random.Generator) -> list[str]:
            return [clients[i] for i in sorted(rng.permutation(len(clients))[:sample])]

        drawn = self.server.draw(clients, sample, uniformly)
        if not drawn:
            return [Aggregated(self.server.version, ())]
        self._waiting = set(drawn)
        return [RequestUpdate(client, "interrupt") for client in drawn]


class FavanoClient(ClientState):
    """The client half: sends ŵ_i, and counts its updates and local steps to compute α_i."""

    def __init__(self, params: Favano, settings: ClientSettings) -> None:
        super().__init__(params.client_side, settings)
        self._debias = params.debias
        self._count = self._positive = self._steps = 0

    def form(self, sequence: int, model: ModelMessage, steps: int, end: Callable[[], Vector]) -> Form:
        start = model.vector
        divisor = np.float32(self.divisor(steps) or 1.0)  # 0 without a local step
        return Form("model", lambda: start + (end() - start) / divisor)

    def divisor(self, steps: int) -> float:
        """Count an update after `steps` local steps, and return its α_i.

        Let E be the number of local steps of an update. α_i is P(E > 0)·`steps` with `stochastic`, and
        the mean of E with `deterministic`. Both are estimated from all updates of this client, including
        this one.
        """
        self._count += 1
        self._positive += steps > 0
        self._steps += steps
        if self._debias == "stochastic":
            return self._positive * steps / self._count
        return self._steps / self._count
