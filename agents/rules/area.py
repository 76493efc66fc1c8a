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
"""Prefix of the names of messages that may still be discarded, in a client's saved memory. The prefix
is followed by the number of the dispatch that the message answers."""
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
"""Entries (field, choice, parameter). The parameter is required if the field has this choice, and
rejected if the field has another choice."""


@dataclass(frozen=True)
class Area(Rule):
    """Average the clients' models, weighted by importance. A client that sends more often has no more
    influence. Client i remembers y_i, the end of its last local training (x_0 before the first). It
    trains from the received x with the step size α received with it, and sends the residual
    m_i = end − y_i. For every message, the server computes the first line below. When the criterion is
    met, it also computes the second line (Iakovidou & Kim, Algorithms 1-2):

        u ← u + p_i m_i, and the sender gets x and α_k
        x ← x + η_g u,   u ← (1 − η_g) u

    The paper has p_i = 1/N and η_g = 1. k counts messages and aggregations; the first models carry α_0.
    A message that meets the criterion is answered with the old x, before the second line is computed.

    At all times x + u = Σ p_i y_i over the members, so fast clients have no more influence than slow
    ones. y_i belongs to client i's last applied message. The p_i are the importances of the members,
    scaled to sum 1. A client is a member from its join to its goodbye:

    - A client that joins, for the first time or after a goodbye, starts with y_i = the x that it is
      sent. Its first message is its full model, from which the server computes the residual.
    - A client that says goodbye sends its y_i, which is removed from the mean. With p_i = 1/N, this is
      u ← (N(x+u) − y_i)/(N−1) − x.
    - A client that leaves without a goodbye stays in the mean with its last y_i. This biases the limit
      until the client is back; the log has a note about it.
    - A client whose memory differs from the y_i in the mean has lost its memory. The old y_i stays in
      the mean for the rest of the run, and the client joins as a new one.

    If the server learns only sums, a sum of Δ messages is added to u when it is known. If a sum is lost,
    each sender is informed with its next model. It then subtracts the lost message from its y_i, so that
    its next message includes the lost one. Clients then never send their y_i, so a goodbye is handled
    like any other leave.
    """

    paper: ClassVar[str] = "Iakovidou, Kim 2024, arXiv 2405.10123"
    equation: ClassVar[str] = "x ← x + u,   u = Σ p_i m_i"

    criterion: Literal["every", "period", "random"] = "every"
    """Times of the aggregations. `every`: at every Δ-th message. `period`: periodically. `random`: at
    exponentially distributed intervals."""
    every: int | None = None
    """Criterion `every`: Δ, messages per aggregation. None with other criteria."""
    period: Annotated[float, "s"] | None = None
    """Criterion `period`: time between aggregations. None with other criteria."""
    rate: float | None = None
    """Criterion `random`: λ_s, mean number of aggregations per second. None with other criteria."""
    tuned: bool = False
    """Criterion `random`: whether to use λ_s* = √(Σλ_i / ((2/N) Σ 1/λ_i)) (section 4.2) over the
    present clients, with λ_i = 1/mean round trip. `rate` is used until all present clients have
    answered once."""
    step: Literal["constant", "harmonic", "theorem7"] = "constant"
    """Formula for α_k. `constant`: `lr`. `harmonic`: c/(k + d). `theorem7`: the step size of Theorem
    7."""
    lr: float | None = None
    """Step `constant`: α. None if clients use their configured step size, and with other steps."""
    c: float | None = None
    """Step `harmonic`: the numerator c. None with other steps."""
    d: float | None = None
    """Step `harmonic`: the offset d. None with other steps."""
    mu: float | None = None
    """Step `theorem7`: strong convexity μ of the local objectives. None with other steps."""
    smoothness: float | None = None
    """Step `theorem7`: smoothness L of the local objectives, at least μ. None with other steps."""
    local_steps: int | None = None
    """Step `theorem7`: number M of local steps of every client. None with other steps."""
    pi_min: float | None = None
    """Step `theorem7`: probability of the rarest event, at most 1/2. An event is a message of a client
    or an aggregation. With criterion `every`, an aggregation has the probability 1/(Δ+1). None with
    other steps."""
    server_lr: float = 1.0
    """η_g, above 0 and at most 1. The share 1 − η_g of u is kept for the next aggregation."""

    def __post_init__(self) -> None:
        for choice, option, name in _NEEDS:
            chosen, value = getattr(self, choice), getattr(self, name)
            if option == chosen and value is None:
                raise ValueError(f"{choice}: {chosen} needs `{name}`")
            if option != chosen and value is not None:
                raise ValueError(f"{name} needs {choice}: {option}, but {choice} is {chosen}")
            (duration if name == "period" else positive)(name, value)
        if self.tuned and self.criterion != "random":
            raise ValueError(f"tuned needs criterion: random, but criterion is {self.criterion}")
        if self.lr is not None and self.step != "constant":
            raise ValueError(f"lr needs step: constant, but step is {self.step}")
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
                f"with criterion: {self.criterion}, a sum may have only one message and reveal it: "
                "use criterion: every"
            )
        if _not_none(self.every) < 2:
            raise ValueError(
                f"every is {self.every}, but the sum of one message reveals it: use at least 2"
            )
        return Sums(int(_not_none(self.every)))

    def begin(self, server: Server) -> AreaState:
        return AreaState(self, server)

    def begin_client(self, settings: ClientSettings) -> AreaClient:
        return AreaClient(self.client_side, settings)

    def step_size(self, k: int) -> float | None:
        """Return α_k; None if clients use their configured step size."""
        if self.step == "harmonic":
            return _not_none(self.c) / (k + _not_none(self.d))
        if self.step == "theorem7":
            mu, smoothness, pi_min = (
                _not_none(self.mu),
                _not_none(self.smoothness),
                _not_none(self.pi_min),
            )
            return theorem7(k, mu, smoothness, self.local_steps or 1, pi_min)
        return self.lr


def _not_none(value: float | None) -> float:
    """Return `value`; `__post_init__` has checked that it is not None."""
    if value is None:
        raise TypeError("a parameter is missing")
    return value


def theorem7(k: int, mu: float, smoothness: float, local_steps: int, pi_min: float) -> float:
    """Return α_k = 1/(π_min M γ k/48 + 1/𝒟) of Theorem 7, with γ = 2μL/(μ+L).

    In the paper, 𝒟 = min{2/(M(μ+L)), γ/(L²(M−1)), √(Mγ²/(64 L⁴(M−1)³)), ∛(γ/(32 L⁴(M−1)³))}. Because μ ≤
    L, 𝒟 is the third term for M > 1. For M = 1, 𝒟 is the first term, because the others are infinite.
    """
    gamma = 2 * mu * smoothness / (mu + smoothness)
    if local_steps == 1:
        most = 2 / (mu + smoothness)
    else:
        most = math.sqrt(local_steps * gamma**2 / (64 * smoothness**4 * (local_steps - 1) ** 3))
    return 1 / (pi_min * local_steps * gamma * k / 48 + 1 / most)


class AreaState(State):
    """The server half. The message that fulfils `every` must be answered with the old x, but actions are
    carried out only after the rule has returned. So the aggregation is delayed until a timer of 0 s
    expires or the next event arrives."""

    def __init__(self, params: Area, server: Server) -> None:
        self.params, self.server = params, server
        self.u = np.zeros_like(server.w)
        """u = Σ p_i y_i − x, shape (d,), where y_i belongs to client i's last message."""
        self._members: dict[str, float] = {}
        """Importance in the run of each client whose y_i is in the mean, by client. The client may
        be absent."""
        self._lost = 0.0
        """Total importance of the y_i in the mean whose clients have lost their memory."""
        self._total = 0.0
        """P, the importance of all y_i in the mean."""
        self._begun_with: dict[str, Vector] = {}
        """y_i of the members without an applied message: the x that they started with, shape (d,)."""
        self._events = 0
        """k: number of messages and aggregations so far."""
        self._settled = True
        """Whether all of u was added to x, except for rounding."""
        self._arrived: list[Contribution] = []
        """Messages since the last aggregation."""
        self._round_trips: dict[str, tuple[int, float]] = {}
        """Number of round trips of each client, and their sum in seconds."""

    def start(self) -> Actions:
        self._admit(list(self.server.clients))
        return [*map(self._send, self.server.clients), *self._first_timer()]

    def update(self, update: Update) -> Actions:
        actions = self._aggregate_if_due()
        client = update.client
        if client not in self._members:
            return [*actions, Ignored(f"{client} has said goodbye")]
        if (update.kind == "model") != (client in self._begun_with):
            return [*actions, *self._restart_member(client)]
        self._add(update)
        self._events += 1
        actions.append(self._send(client))
        if not self._is_due:
            return actions
        if self.server.sums_only:
            contributions, self._arrived = tuple(self._arrived), []
            return [*actions, SumUp(contributions)]
        return [*actions, SetTimer(_TIMER, 0)]

    def apply_sum(self, request: SumUp, total: Vector) -> Aggregated:
        p = self._share(next(iter(self.server.population.values())))
        add_scaled(self.u, total, p)
        used = [replace(contribution, weight=p) for contribution in request.contributions]
        return self._aggregate(used)

    def join(self, client: str) -> Actions:
        actions = self._aggregate_if_due()
        if client not in self._members:
            self._admit([client])
        return [*actions, self._send(client)]

    def leave(self, client: str) -> Actions:
        if client not in self._members:
            return []
        last = "the model it started with" if client in self._begun_with else "its last model"
        return [
            Remark(
                f"{client} left without a goodbye: until it is back, {last} stays in the mean with "
                f"weight {self._weight(client):.3g} and biases the limit"
            )
        ]

    def lose_work(self, client: str) -> Actions:
        return self.join(client)  # y_i stays in the mean, so there is nothing to remark

    def retire(self, client: str, memory: Vector | None) -> Actions:
        """Remove y_i from the mean: u ← (P (x+u) − p_i y_i)/(P − p_i) − x, where P is the sum of all p_i
        in the mean."""
        if client not in self._members:
            return []
        y = self._begun_with.pop(client, memory)
        if y is None:
            raise ValueError(
                f"{client} says goodbye without its memory, but messages of it were applied"
            )
        weight, before = self._weight(client), self._total
        del self._members[client]
        self._count_members()
        if self._total == 0:
            return [Remark(f"{client} retired, the last client: the model is unchanged")]
        shift = self.server.w - y
        self._settled = self._settled and not shift.any()
        add_scaled(self.u, shift, weight)
        self.u *= before / self._total
        text = (
            f"{client} retired: its model was removed from the mean, in which it had weight {weight:.3g}"
        )
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
        """Recompute P from the members."""
        self._total = math.fsum((*self._members.values(), self._lost))

    def _weight(self, client: str) -> float:
        return self._share(self._members[client])

    def _share(self, importance: float) -> float:
        return importance / self._total

    def _admit(self, clients: Sequence[str]) -> None:
        """Add `clients` to the mean with y_i = x: x + u ← (P (x+u) + p_i x)/(P + p_i)."""
        if not clients:
            return
        before, x = self._total, self.server.w.copy()
        for client in clients:
            self._members[client] = self.server.population[client]
            self._begun_with[client] = x
        self._count_members()
        self.u *= before / self._total

    def _add(self, update: Update) -> None:
        """Add m_i: u ← u + p_i m_i. A client's first message is a model; m_i is then the difference
        between this model and y_i. If the server learns only sums, `update.vector` is the model that
        the client trained from: y_i has that value until the sum is known."""
        client, p = update.client, self._weight(update.client)
        begun_with = self._begun_with.pop(client, None)
        residual = update.vector if begun_with is None else update.vector - begun_with
        if residual.size:
            add_scaled(self.u, residual, p)
        self._arrived.append(update.contribution(1.0 if self.server.sums_only else p))
        count, total = self._round_trips.get(client, (0, 0.0))
        self._round_trips[client] = (count + 1, total + to_seconds(update.round_trip))

    def _restart_member(self, client: str) -> list[Action]:
        """Make `client` a new member, because its residuals do not start from the y_i in the mean. The
        old y_i stays in the mean and does not change any more."""
        weight = self._weight(client)
        first_lost = self._begun_with.pop(client, None) is not None
        self._lost += self._members.pop(client)
        self._admit([client])
        reason = "its first message was lost" if first_lost else "it lost its memory"
        return [
            Ignored(f"{reason}: {client} restarts as a new member"),
            Remark(
                f"{client} restarts as a new member, because {reason}: its old model stays in the mean "
                f"with weight {weight:.3g} and biases the limit"
            ),
            self._send(client),
        ]

    @property
    def _is_due(self) -> bool:
        return self.params.every is not None and len(self._arrived) >= self.params.every

    def _aggregate_if_due(self) -> list[Action]:
        return [self._aggregate_arrived()] if self._is_due else []

    def _aggregate_arrived(self) -> Aggregated:
        used, self._arrived = self._arrived, []
        return self._aggregate(used)

    def _aggregate(self, used: Sequence[Contribution]) -> Aggregated:
        """Aggregate: x ← x + η_g u. The rounding error of x stays in u for the next aggregation, so that
        small steps are not lost. If no message has arrived since the last aggregation, x changes only if
        a client has said goodbye, or if a part of u was left because η_g < 1."""
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
                return [SetPeriodicTimer(_TIMER, from_seconds(_not_none(self.params.period)))]
            case "random":
                return [self._random_timer()]

    def _random_timer(self) -> SetTimer:
        rate = self._tuned_rate() if self.params.tuned else None
        seconds = self.server.rng.exponential(1 / (rate or _not_none(self.params.rate)))
        return SetTimer(_TIMER, from_seconds(seconds))

    def _tuned_rate(self) -> float | None:
        """Return λ_s* per second; None if a present client has not answered yet."""
        clients = self.server.clients
        round_trips = [self._round_trips[c] for c in clients if c in self._round_trips]
        means = [total / count for count, total in round_trips if total > 0]
        if not means or len(means) < len(clients):
            return None
        return math.sqrt(sum(1 / t for t in means) / (2 / len(means) * sum(means)))


@dataclass(frozen=True, slots=True)
class Memory:
    """The two vectors that may be a client's y_i, each with the sequence number of its update. One
    is the end of the last training that the aggregator is known to have applied. The other is the
    end of a later training that the aggregator may have applied. The next dispatch says which of
    the two is y_i.

    If the server learns only sums, a message may be discarded after it has arrived, together with its
    sum. y_i is then the sum of all messages that were sent and are not known to be discarded.
    """

    applied: tuple[int, Vector] | None = None
    """Sequence number and y_i of the last applied update, shape (d,)."""
    sent: tuple[int, Vector] | None = None
    """Sequence number and y_i of a later update, shape (d,)."""
    waiting: Mapping[int, Vector] = field(default_factory=dict)
    """Messages that may still be discarded, shape (d,), by the dispatch that they answer."""

    @classmethod
    def from_saved(cls, saved: SavedVectors) -> Memory:
        waiting = dict(entry for name, entry in saved.items() if name.startswith(_WAITING))
        return cls(saved.get("applied"), saved.get("sent"), waiting)

    @property
    def saved(self) -> SavedVectors:
        ends = {"applied": self.applied, "sent": self.sent}
        waiting = {f"{_WAITING} {dispatch}": (dispatch, sent) for dispatch, sent in self.waiting.items()}
        return {name: end for name, end in ends.items() if end is not None} | waiting

    @property
    def newest(self) -> int:
        """Highest sequence number in memory; 0 if the memory is empty."""
        return max((end[0] for end in (self.applied, self.sent) if end), default=0)

    def acknowledged(
        self, sequence: int, waiting: Container[int] = (), lost: Iterable[int] = ()
    ) -> Memory:
        """Return the memory after the aggregator has acknowledged `sequence` as the last update that it
        applied. The memory is empty if this client does not know that update, or if `sequence` is 0,
        because no update of this membership was applied. Messages that answer the dispatches in `lost`
        were discarded. Messages that answer the dispatches in `waiting` may still be discarded."""
        for end in (self.sent, self.applied):
            if end is not None and end[0] == sequence:
                y = end[1]
                for dispatch in self.waiting.keys() & set(lost):
                    y = y - self.waiting[dispatch]
                still_waiting = {n: message for n, message in self.waiting.items() if n in waiting}
                return Memory((sequence, y), None, still_waiting)
        return Memory()


class AreaClient(ClientState):
    """The client half: sends m_i = x_i^M − y_i, or x_i^M if the aggregator has no y_i of this client."""

    def __init__(self, side: ClientSide, settings: ClientSettings) -> None:
        super().__init__(side, settings)
        self._as_sent = settings.as_sent
        self._memory = Memory.from_saved(settings.memory or {})

    @property
    def newest(self) -> int:
        return self._memory.newest

    def acknowledge(self, message: ModelMessage) -> None:
        self._memory = self._memory.acknowledged(message.acknowledged, message.waiting, message.lost)

    def form(self, sequence: int, model: ModelMessage, steps: int, end: Callable[[], Vector]) -> Form:
        """Return the message for training result `end()`. If rounding or clipping changes m_i, y_i
        changes by the same amount, so that the next message corrects the error."""
        y = x = end()
        applied, waiting = self._memory.applied, self._memory.waiting
        if self._as_sent is not None:
            previous = model.vector if applied is None else applied[1]
            sent = self._as_sent(sequence, model.dispatch, x - previous)
            y = (previous + sent).astype(x.dtype)
            waiting = {**waiting, model.dispatch: sent}
        self._memory = Memory(applied, (sequence, y), waiting)
        if applied is None:
            return Form("model", lambda: x, memory=self._memory.saved)
        return Form("residual", lambda: x - applied[1], memory=self._memory.saved)

    def goodbye_models(self) -> Sequence[tuple[int, Vector]]:
        """Return y_i of the last update that is known to be applied, and y_i of the update that was sent
        after it. Without a known applied update, the first entry is empty and has number 0. Without a
        later update, there is no second entry. The aggregator knows which of the two updates it has
        applied last."""
        candidates = (self._memory.applied or (0, np.zeros(0, np.float32)), self._memory.sent)
        return [candidate for candidate in candidates if candidate is not None]
