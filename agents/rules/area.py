"""AREA, asynchronous exact averaging (Iakovidou, Kim 2024, arXiv 2405.10123)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from agents.checks import positive
from agents.rules.interface import (
    Action,
    Actions,
    Aggregated,
    ClientSide,
    Contribution,
    Ignored,
    Remark,
    Rule,
    Send,
    Server,
    SetTimer,
    State,
    Update,
)
from agents.vectors import Vector, add_scaled

_TIMER = "aggregate"

_NEEDS = (
    ("criterion", "every", "every"),
    ("criterion", "period", "period"),
    ("criterion", "random", "rate"),
    ("step", "harmonic", "c"),
    ("step", "harmonic", "d"),
    ("step", "theorem7", "mu"),
    ("step", "theorem7", "smoothness"),
    ("step", "theorem7", "local_steps"),
    ("step", "theorem7", "pi_min"),
)
"""Which choice needs which parameter, that no other takes."""


@dataclass(frozen=True)
class Area(Rule):
    """Client i remembers y_i, where its last local training ended (x_0 before its first). It trains from
    the x that it got, with the step size α that came with it, and sends the residual m_i = end − y_i.
    On a message, and then where the criterion holds (Iakovidou & Kim, Algorithms 1-2):

        u ← u + p_i m_i, and the sender gets x and α_k
        x ← x + η_g u,   u ← (1 − η_g) u

    The paper has p_i = 1/N and η_g = 1. k counts both kinds of event; the first models carry α_0. The
    message that fulfils the criterion is answered first, with the old x.

    At all times x + u = Σ p_i y_i over all clients of the run, present or not, so that fast clients pull
    no harder than slow ones. A client that is away stays in the mean with its last y_i, and pulls the
    limit; one that retires takes its y_i out, the p of the others grow in proportion. A client whose
    memory is no longer the y_i of this mean is left out from then on, as its residuals would shift it.
    """

    paper: ClassVar[str] = "Iakovidou, Kim 2024, arXiv 2405.10123"
    equation: ClassVar[str] = "x ← x + u,   u = Σ p_i m_i"

    criterion: Literal["every", "period", "random"] = "every"
    """When to aggregate: at every n-th message, periodically, or at exponential intervals."""
    every: int | None = None
    """Criterion `every`: messages per aggregation, Δ."""
    period: Annotated[float, "s"] | None = None
    """Criterion `period`: time between aggregations."""
    rate: float | None = None
    """Criterion `random`: aggregations per second on average, λ_s."""
    tuned: bool = False
    """Criterion `random`: λ_s* = √(Σλ_i / ((2/N) Σ 1/λ_i)) (section 4.2) over the clients that are
    present, with λ_i = 1/mean round trip; `rate` until all of these have answered."""
    step: Literal["constant", "harmonic", "theorem7"] = "constant"
    """α_k: `lr`; c/(k + d); or that of Theorem 7."""
    lr: float | None = None
    """Step `constant`: α; None for the clients' own."""
    c: float | None = None
    """Step `harmonic`: numerator."""
    d: float | None = None
    """Step `harmonic`: offset."""
    mu: float | None = None
    """Step `theorem7`: strong convexity μ of the local objectives."""
    smoothness: float | None = None
    """Step `theorem7`: smoothness L of the local objectives, at least μ."""
    local_steps: int | None = None
    """Step `theorem7`: local steps M of every client."""
    pi_min: float | None = None
    """Step `theorem7`: probability of the rarest event, the server's included (with `every`, that has
    1/(Δ+1)); at most 1/2."""
    server_lr: float = 1.0
    """η_g, at most 1; what it leaves of u counts the next time."""

    def __post_init__(self) -> None:
        for choice, option, name in _NEEDS:
            chosen, value = getattr(self, choice), getattr(self, name)
            if option == chosen and value is None:
                raise ValueError(f"{choice}: {chosen} needs `{name}`")
            if option != chosen and value is not None:
                raise ValueError(f"{name} belongs to {choice}: {option}")
            positive(name, value)
        if self.tuned and self.criterion != "random":
            raise ValueError("tuned belongs to criterion: random")
        if self.lr is not None and self.step != "constant":
            raise ValueError("lr belongs to step: constant")
        positive("lr", self.lr)
        if self.pi_min is not None and self.pi_min > 0.5:
            raise ValueError(f"pi_min is {self.pi_min:g}, expected at most 0.5")
        if self.mu is not None and self.smoothness is not None and self.mu > self.smoothness:
            raise ValueError(f"mu is {self.mu:g}, expected at most smoothness, {self.smoothness:g}")
        if not 0 < self.server_lr <= 1:
            raise ValueError(f"server_lr is {self.server_lr:g}, expected above 0 and at most 1")

    @property
    def client_side(self) -> ClientSide:
        return ClientSide("residual")

    def begin(self, server: Server) -> AreaState:
        return AreaState(self, server)

    def step_size(self, k: int) -> float | None:
        """α_k; None for the clients' own."""
        if self.step == "harmonic":
            return _given(self.c) / (k + _given(self.d))
        if self.step == "theorem7":
            mu, smoothness, pi_min = _given(self.mu), _given(self.smoothness), _given(self.pi_min)
            return theorem7(k, mu, smoothness, self.local_steps or 1, pi_min)
        return self.lr


def _given(value: float | None) -> float:
    """A parameter that `__post_init__` has made sure of."""
    if value is None:
        raise TypeError("not given")
    return value


def theorem7(k: int, mu: float, smoothness: float, local_steps: int, pi_min: float) -> float:
    """α_k = 1/(π_min M γ k/48 + 1/𝒟) of Theorem 7, with γ = 2μL/(μ+L)."""
    gamma = 2 * mu * smoothness / (mu + smoothness)
    most = 2 / (local_steps * (mu + smoothness))  # 𝒟
    if local_steps > 1:
        further = local_steps - 1
        drift = 32 * smoothness**4 * further**3
        most = min(
            most,
            gamma / (smoothness**2 * further),
            math.sqrt(local_steps * gamma**2 / (2 * drift)),
            math.cbrt(gamma / drift),
        )
    return 1 / (pi_min * local_steps * gamma * k / 48 + 1 / most)


class AreaState(State):
    """The message that fulfils `every` is to be answered with the old x, and actions are carried out
    after the rule has returned. So that aggregation waits for a timer of no time, or for the next event,
    whichever is first."""

    def __init__(self, params: Area, server: Server) -> None:
        self._params = params
        self._server = server
        self.u = np.zeros_like(server.w)
        """What x lacks of Σ p_i y_i, y_i as of client i's last message."""
        self._first = server.w.copy()
        """x_0, the y_i of a client that has not been heard."""
        self._importance = dict(server.population)
        self._unheard = set(server.population)
        self._out: set[str] = set()
        """Clients that are not listened to any more: retired, or with another memory than the mean's."""
        self._events = 0
        """k."""
        self._arrived: list[Contribution] = []
        self._round_trips: dict[str, tuple[int, float]] = {}
        """Of each client: how many, and their sum in seconds."""

    def start(self) -> Actions:
        away = [c for c in self._importance if c not in self._server.clients]
        timer = [] if self._params.criterion == "every" else [self._next_timer()]
        return [*map(self._frozen, away), *(self._send(c) for c in self._server.clients), *timer]

    def update(self, update: Update) -> Actions:
        actions = self._aggregate_if_due()
        client = update.client
        if client in self._out:
            return [*actions, Ignored("left out: its memory is not in the model's mean")]
        if (update.kind == "model") != (client in self._unheard):
            return [*actions, *self._leave_out(client)]
        self._add(update)
        self._events += 1
        actions.append(self._send(client))
        return [*actions, SetTimer(_TIMER, 0.0)] if self._due else actions

    def join(self, client: str) -> Actions:
        return [*self._aggregate_if_due(), *([] if client in self._out else [self._send(client)])]

    def leave(self, client: str) -> Actions:
        return [] if client in self._out else [self._frozen(client)]

    def retire(self, client: str, memory: Vector) -> Actions:
        """u ← ((x+u) − p_i y_i)/(1 − p_i) − x. With p_i = 1/N that is (N(x+u) − y_i)/(N−1) − x."""
        if client in self._out:
            return []
        self._out.add(client)
        p = self._importance.pop(client)
        if not self._importance:
            return [Remark(f"{client} retired, the last client: the model stays as it is")]
        add_scaled(self.u, self._server.w, p)
        add_scaled(self.u, self._first if client in self._unheard else memory, -p)
        self.u /= 1 - p
        self._importance = {other: q / (1 - p) for other, q in self._importance.items()}
        return [
            Remark(f"{client} retired: its model is out of the mean, its weight of {p:.3g} the others'")
        ]

    def timer(self, name: str) -> Actions:
        if self._params.criterion == "every":
            return self._aggregate_if_due()
        return [self._aggregate(), self._next_timer()]

    def _send(self, client: str) -> Send:
        return Send(client, lr=self._params.step_size(self._events))

    def _add(self, update: Update) -> None:
        """u ← u + p_i m_i, where the model that a client sends first is a residual from x_0."""
        client, p = update.client, self._importance[update.client]
        residual = update.vector - self._first if update.kind == "model" else update.vector
        add_scaled(self.u, residual, p)
        self._unheard.discard(client)
        self._arrived.append(update.contribution(p))
        count, total = self._round_trips.get(client, (0, 0.0))
        self._round_trips[client] = (count + 1, total + update.round_trip)

    def _leave_out(self, client: str) -> list[Action]:
        """Its residuals would not start from the y_i that is in the mean: it gets no model any more."""
        self._out.add(client)
        reason = "its first message was lost" if client in self._unheard else "it lost its memory"
        return [
            Ignored(f"{client} is left out: {reason}"),
            Remark(
                f"{client} is left out for the rest of the run, as {reason}: {self._last(client)} keeps "
                f"its weight of {self._importance[client]:.3g} in the mean and pulls the limit"
            ),
        ]

    def _frozen(self, client: str) -> Remark:
        return Remark(
            f"{client} is away: until it is back, {self._last(client)} keeps its weight of "
            f"{self._importance[client]:.3g} in the mean and pulls the limit"
        )

    def _last(self, client: str) -> str:
        return "the initial model" if client in self._unheard else "its last model"

    @property
    def _due(self) -> bool:
        return self._params.criterion == "every" and len(self._arrived) >= (self._params.every or 1)

    def _aggregate_if_due(self) -> list[Action]:
        return [self._aggregate()] if self._due else []

    def _aggregate(self) -> Aggregated:
        """x ← x + η_g u. What rounding keeps out of x stays in u: small steps are not lost."""
        self._events += 1
        if not self._arrived:
            return Aggregated(self._server.version, ())
        moved = self._server.w.copy()
        add_scaled(self._server.w, self.u, self._params.server_lr)
        moved -= self._server.w
        self.u += moved
        used, self._arrived = self._arrived, []
        return self._server.aggregated(used)

    def _next_timer(self) -> SetTimer:
        if self._params.criterion == "period":
            return SetTimer(_TIMER, _given(self._params.period))
        rate = self._tuned_rate() if self._params.tuned else None
        return SetTimer(_TIMER, self._server.rng.exponential(1 / (rate or _given(self._params.rate))))

    def _tuned_rate(self) -> float | None:
        """λ_s* per second, or None where a client that is present has not answered yet."""
        clients = self._server.clients
        seen = [self._round_trips[c] for c in clients if c in self._round_trips]
        means = [total / count for count, total in seen if total > 0]
        if not means or len(means) < len(clients):
            return None
        return math.sqrt(sum(1 / t for t in means) / (2 / len(means) * sum(means)))
