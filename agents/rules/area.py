"""AREA, asynchronous exact averaging (Iakovidou, Kim 2024, arXiv 2405.10123)."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import numpy as np

from agents.checks import duration, positive
from agents.models.vectors import Vector, add_scaled
from agents.rules.client_half import Form, SavedVectors
from agents.rules.interface import (
    Action,
    Actions,
    Aggregated,
    ClientSettings,
    ClientSide,
    ClientState,
    Contribution,
    Ignored,
    Remark,
    Rule,
    Send,
    Server,
    SetPeriodicTimer,
    SetTimer,
    State,
    Sums,
    SumUp,
    Update,
)
from agents.timing.nanoseconds import from_seconds, to_seconds
from agents.wire.payloads import ModelMessage

_WAITING = "waiting"
"""Name of a vector in a client's memory, before the number of a dispatch."""
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

    At all times x + u = Σ p_i y_i over the members, so that fast clients pull no harder than slow ones.
    y_i is as of the last message of client i that was applied, and the p_i are the importances of the
    members, scaled to sum 1. A client is a member from its join to its goodbye:

    - One that joins, for the first time or after a goodbye, begins with y_i = the x that it is sent. Its
      first message carries its whole model, of which the server makes the residual.
    - One that says goodbye hands in its y_i, which is taken out of the mean: with p_i = 1/N,
      u ← (N(x+u) − y_i)/(N−1) − x.
    - One that is gone without a goodbye stays in the mean with its last y_i, which pulls the limit until
      it is back; the log says so.
    - One whose memory is not the y_i of the mean has lost it. That y_i stays in the mean, as of a client
      that is gone for good, and the client joins anew.

    With secure aggregation u gets the sum of Δ messages as soon as that is opened. Where it cannot be,
    each of its senders is told so with the next model, and takes that message out of its y_i, so that
    its next one makes up for it. Nobody hands in a y_i: a goodbye is a departure like any other.
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
            (duration if name == "period" else positive)(name, value)
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

    def sums(self) -> Sums:
        if self.criterion != "every":
            raise ValueError(
                f"with criterion: {self.criterion} an aggregation may be of one message, and its sum is "
                "that message: take criterion: every"
            )
        if _given(self.every) < 2:
            raise ValueError("a sum of one message is that message: take `every` of 2 or more")
        return Sums(int(_given(self.every)))

    def begin(self, server: Server) -> AreaState:
        return AreaState(self, server)

    def begin_client(self, settings: ClientSettings) -> AreaClient:
        return AreaClient(self.client_side, settings)

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
    """α_k = 1/(π_min M γ k/48 + 1/𝒟) of Theorem 7, with γ = 2μL/(μ+L).

    𝒟 is the paper's min{2/(M(μ+L)), γ/(L²(M−1)), √(Mγ²/(64 L⁴(M−1)³)), ∛(γ/(32 L⁴(M−1)³))}: as μ ≤ L,
    the third for M > 1 and, as the others are infinite, the first for M = 1.
    """
    gamma = 2 * mu * smoothness / (mu + smoothness)
    if local_steps == 1:
        most = 2 / (mu + smoothness)
    else:
        most = math.sqrt(local_steps * gamma**2 / (64 * smoothness**4 * (local_steps - 1) ** 3))
    return 1 / (pi_min * local_steps * gamma * k / 48 + 1 / most)


class AreaState(State):
    """The message that fulfils `every` is to be answered with the old x, and actions are carried out
    after the rule has returned. So that aggregation waits for a timer of no time, or for the next event,
    whichever is first."""

    def __init__(self, params: Area, server: Server) -> None:
        self.params, self.server = params, server
        self.u = np.zeros_like(server.w)
        """What x lacks of Σ p_i y_i, y_i as of client i's last message."""
        self._members: dict[str, float] = {}
        """Clients whose y_i is in the mean, present or not, with their importance in the run."""
        self._lost = 0.0
        """Importance of the y_i in the mean that nobody remembers any more."""
        self._total = 0.0
        """P, the importance of all that is in the mean."""
        self._begun_with: dict[str, Vector] = {}
        """y_i of the members of which no message was applied: the x that they began with."""
        self._events = 0
        """k."""
        self._settled = True
        """Whether x has taken in all of u but what rounding keeps out of x."""
        self._arrived: list[Contribution] = []
        self._round_trips: dict[str, tuple[int, float]] = {}
        """Of each client: how many, and their sum in seconds."""

    def start(self) -> Actions:
        self._admit(list(self.server.clients))
        return [*map(self._send, self.server.clients), *self._first_timer()]

    def update(self, update: Update) -> Actions:
        actions = self._aggregate_if_due()
        client = update.client
        if client not in self._members:
            return [*actions, Ignored(f"{client} has said goodbye")]
        if (update.kind == "model") != (client in self._begun_with):
            return [*actions, *self._begin_anew(client)]
        self._add(update)
        self._events += 1
        actions.append(self._send(client))
        if not self._due:
            return actions
        if self.server.masked:
            wanted, self._arrived = tuple(self._arrived), []
            return [*actions, SumUp(wanted)]
        return [*actions, SetTimer(_TIMER, 0)]

    def summed(self, wanted: SumUp, total: Vector) -> Aggregated:
        p = self._share(next(iter(self.server.population.values())))
        add_scaled(self.u, total, p)
        return self._aggregate([replace(one, weight=p) for one in wanted.contributions])

    def join(self, client: str) -> Actions:
        actions = self._aggregate_if_due()
        if client not in self._members:
            self._admit([client])
        return [*actions, self._send(client)]

    def leave(self, client: str) -> Actions:
        if client not in self._members:
            return []
        last = "the model that it began with" if client in self._begun_with else "its last model"
        return [
            Remark(
                f"{client} is away: until it is back, {last} keeps its weight of "
                f"{self._weight(client):.3g} in the mean and pulls the limit"
            )
        ]

    def retire(self, client: str, memory: Vector | None) -> Actions:
        """u ← (P (x+u) − p_i y_i)/(P − p_i) − x, with P the sum of all p_i that are in the mean."""
        if client not in self._members:
            return []
        y = self._begun_with.pop(client, memory)
        if y is None:
            raise ValueError(f"{client} hands in no memory, but messages of it were applied")
        weight, before = self._weight(client), self._total
        del self._members[client]
        self._count_members()
        if self._total == 0:
            return [Remark(f"{client} retired, the last client: the model stays as it is")]
        shift = self.server.w - y
        self._settled = self._settled and not shift.any()
        add_scaled(self.u, shift, weight)
        self.u *= before / self._total
        text = f"{client} retired: its model is out of the mean, its weight of {weight:.3g} the others'"
        return [Remark(text)]

    def timer(self, name: str) -> Actions:
        match self.params.criterion:
            case "every":
                return self._aggregate_if_due()
            case "period":
                return [self._aggregate_arrived()]
            case "random":
                return [self._aggregate_arrived(), self._random_timer()]

    def _send(self, client: str) -> Send:
        return Send(client, lr=self.params.step_size(self._events))

    def _count_members(self) -> None:
        """Bring P up to date."""
        self._total = math.fsum((*self._members.values(), self._lost))

    def _weight(self, client: str) -> float:
        """p_i of a member."""
        return self._share(self._members[client])

    def _share(self, importance: float) -> float:
        return importance / self._total

    def _admit(self, clients: Sequence[str]) -> None:
        """They join the mean with y_i = x: x + u ← (P (x+u) + p_i x)/(P + p_i)."""
        if not clients:
            return
        before, x = self._total, self.server.w.copy()
        for client in clients:
            self._members[client] = self.server.population[client]
            self._begun_with[client] = x
        self._count_members()
        self.u *= before / self._total

    def _add(self, update: Update) -> None:
        """u ← u + p_i m_i, where the model that a client sends first is a residual from its y_i. Of a
        masked one only what it was trained from is known: that is its y_i until the sum is opened."""
        client, p = update.client, self._weight(update.client)
        begun_with = self._begun_with.pop(client, None)
        residual = update.vector if begun_with is None else update.vector - begun_with
        if residual.size:
            add_scaled(self.u, residual, p)
        self._arrived.append(update.contribution(1.0 if self.server.masked else p))
        count, total = self._round_trips.get(client, (0, 0.0))
        self._round_trips[client] = (count + 1, total + to_seconds(update.round_trip))

    def _begin_anew(self, client: str) -> list[Action]:
        """Its residuals would not start from the y_i of the mean: that one stays there, frozen."""
        weight = self._weight(client)
        never = self._begun_with.pop(client, None) is not None
        self._lost += self._members.pop(client)
        self._admit([client])
        reason = "its first message was lost" if never else "it lost its memory"
        return [
            Ignored(f"{reason}: {client} begins anew"),
            Remark(
                f"{client} begins anew, as {reason}: what is in the mean of it keeps its weight of "
                f"{weight:.3g} there, beside what it sends from now on, and pulls the limit"
            ),
            self._send(client),
        ]

    @property
    def _due(self) -> bool:
        return self.params.every is not None and len(self._arrived) >= self.params.every

    def _aggregate_if_due(self) -> list[Action]:
        return [self._aggregate_arrived()] if self._due else []

    def _aggregate_arrived(self) -> Aggregated:
        used, self._arrived = self._arrived, []
        return self._aggregate(used)

    def _aggregate(self, used: Sequence[Contribution]) -> Aggregated:
        """x ← x + η_g u. What rounding keeps out of x stays in u, for the next message: small steps are
        not lost. Without a message since the last time, x moves only where a client has said goodbye, or
        η_g < 1 has left some of u."""
        self._events += 1
        if self._settled and not used:
            return Aggregated(self.server.version, ())
        moved = self.server.w.copy()
        add_scaled(self.server.w, self.u, self.params.server_lr)
        moved -= self.server.w
        self._settled = self.params.server_lr == 1 or not (used or moved.any())
        if not used and not moved.any():
            return Aggregated(self.server.version, ())
        self.u += moved
        return self.server.aggregated(used)

    def _first_timer(self) -> list[Action]:
        match self.params.criterion:
            case "every":
                return []
            case "period":
                return [SetPeriodicTimer(_TIMER, from_seconds(_given(self.params.period)))]
            case "random":
                return [self._random_timer()]

    def _random_timer(self) -> SetTimer:
        rate = self._tuned_rate() if self.params.tuned else None
        seconds = self.server.rng.exponential(1 / (rate or _given(self.params.rate)))
        return SetTimer(_TIMER, from_seconds(seconds))

    def _tuned_rate(self) -> float | None:
        """λ_s* per second, or None where a client that is present has not answered yet."""
        clients = self.server.clients
        seen = [self._round_trips[c] for c in clients if c in self._round_trips]
        means = [total / count for count, total in seen if total > 0]
        if not means or len(means) < len(clients):
            return None
        return math.sqrt(sum(1 / t for t in means) / (2 / len(means) * sum(means)))


@dataclass(frozen=True, slots=True)
class Memory:
    """A client's y_i: result of the last training that the aggregator has applied, and of one that it
    may have applied, each with the sequence number of its update. The next dispatch tells which of them
    holds.

    With secure aggregation a message may still be lost after it has arrived, with the sum that it is in.
    y_i is then the sum of what was sent and is not known to be lost."""

    applied: tuple[int, Vector] | None = None
    sent: tuple[int, Vector] | None = None
    waiting: Mapping[int, Vector] = field(default_factory=dict)
    """By the dispatch that it answered, what was sent and may still be lost."""

    @classmethod
    def of(cls, saved: SavedVectors) -> Memory:
        """What was `saved`."""
        waiting = dict(known for name, known in saved.items() if name.startswith(_WAITING))
        return cls(saved.get("applied"), saved.get("sent"), waiting)

    @property
    def saved(self) -> SavedVectors:
        """As it is kept on the disk."""
        ends = {"applied": self.applied, "sent": self.sent}
        waiting = {f"{_WAITING} {dispatch}": (dispatch, sent) for dispatch, sent in self.waiting.items()}
        return {name: known for name, known in ends.items() if known is not None} | waiting

    @property
    def newest(self) -> int:
        """Highest sequence number in memory; 0 for none."""
        return max((known[0] for known in (self.applied, self.sent) if known), default=0)

    def acknowledged(
        self, sequence: int, waiting: Container[int] = (), lost: Iterable[int] = ()
    ) -> Memory:
        """Memory after the aggregator has acknowledged `sequence` as the last update that it took:
        empty where that update is unknown here, or is none of this membership (0). Of the messages that
        answered the dispatches in `lost` nothing came, and of those in `waiting` nothing may come."""
        for known in (self.sent, self.applied):
            if known is not None and known[0] == sequence:
                y = known[1]
                for gone in self.waiting.keys() & set(lost):
                    y = y - self.waiting[gone]
                kept = {number: one for number, one in self.waiting.items() if number in waiting}
                return Memory((sequence, y), None, kept)
        return Memory()


class AreaClient(ClientState):
    """The client's half: m_i = x_i^M − y_i; without a y_i that the aggregator knows, x_i^M itself."""

    def __init__(self, side: ClientSide, settings: ClientSettings) -> None:
        super().__init__(side, settings)
        self._as_sent = settings.as_sent
        self._memory = Memory.of(settings.memory or {})

    @property
    def newest(self) -> int:
        return self._memory.newest

    def acknowledge(self, message: ModelMessage) -> None:
        self._memory = self._memory.acknowledged(message.acknowledged, message.waiting, message.lost)

    def form(self, sequence: int, model: ModelMessage, steps: int, end: Callable[[], Vector]) -> Form:
        """What rounding keeps out of m_i, and what is cut off, is not in y_i either: the next message
        makes up for it."""
        y = x = end()
        known, waiting = self._memory.applied, self._memory.waiting
        if self._as_sent is not None:
            begun = model.vector if known is None else known[1]
            sent = self._as_sent(sequence, model.dispatch, x - begun)
            y = (begun + sent).astype(x.dtype)
            waiting = {**waiting, model.dispatch: sent}
        self._memory = Memory(known, (sequence, y), waiting)
        if known is None:
            return Form("model", lambda: x, memory=self._memory.saved)
        return Form("residual", lambda: x - known[1], memory=self._memory.saved)

    def farewells(self) -> Sequence[tuple[int, Vector]]:
        """y_i, as of nothing, of what was applied or of what was sent last: the aggregator knows which
        of it is the last that it has applied."""
        known = (self._memory.applied or (0, np.zeros(0, np.float32)), self._memory.sent)
        return [one for one in known if one is not None]
