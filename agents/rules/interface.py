"""What a rule is: a pure state machine on the server. Updates come in, actions go out.

A rule reads no clock and opens no socket; randomness comes from `Server.rng`. It owns the global model
while the run lasts: it changes `server.w` in place and counts `server.version`.

The same inputs must give the same actions and models, to the bit: so a run goes on after a crash, and
can be replayed: nothing may depend on the order of a set of texts. For the same reason a state consists
of what `agents.aggregator.snapshot` keeps: numbers, texts, lists, tuples, dicts, sets, deques, NumPy
arrays, the building blocks in `agents.rules.parts`, and objects of classes at the top level of a rule's
own modules; what such a class does when it is made is not done again when it is read back.

A complete rule (it adds every update at once), to copy from:

    @dataclass(frozen=True)
    class Eager(Rule):
        paper: ClassVar[str] = "nobody's"
        equation: ClassVar[str] = "w ← w + η_g p_i Δ_i"
        server_lr: float = 1.0

        def begin(self, server: Server) -> "EagerState":
            return EagerState(self, server)

    class EagerState(State):
        def __init__(self, params: Eager, server: Server) -> None:
            self.params, self.server = params, server

        def update(self, update: Update) -> Actions:
            weight = self.params.server_lr * self.server.clients[update.client]
            add_scaled(self.server.w, update.vector, weight)
            return [self.server.aggregated([update.contribution(weight)]), Send(update.client)]
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np

from agents.models.buffers import NONE, Buffers
from agents.models.vectors import Vector, add_scaled, mix
from agents.rules.client_half import ClientSettings as ClientSettings
from agents.rules.client_half import ClientSide as ClientSide
from agents.rules.client_half import ClientState as ClientState
from agents.rules.client_half import Kind as Kind
from agents.timing.nanoseconds import Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one client sends after local training. `vector` has shape (d,) and is not to be kept."""

    client: str
    dispatch: int
    """The dispatch that it answers: names the update, as no other in the run does."""
    base_version: int
    vector: Vector
    kind: Kind = "delta"
    samples: int = 1
    """Training samples of the client's shard."""
    steps: int = 1
    """Local steps done."""
    effective_steps: float = 1.0
    """FedNova: what τ_eff counts this update for; 1 for a delta that is not normalised."""
    round_trip: Nanoseconds = 0
    """From the dispatch of the model to the update's arrival."""
    dispatched: Nanoseconds = 0
    """Device time at which the model left."""

    def contribution(self, weight: float) -> Contribution:
        """What is to be kept of it until it is aggregated."""
        return Contribution(self.client, self.dispatch, self.base_version, weight)


@dataclass(frozen=True, slots=True)
class Contribution:
    """The weight that one update was given in an aggregation, or is to be given, up to a scale."""

    client: str
    dispatch: int
    base_version: int
    weight: float


@dataclass(frozen=True, slots=True)
class Aggregated:
    """The global model became `version`; `contributions` went into it.

    Without contributions: a round to which nobody contributed. The version stays as it was, unless the
    model moved all the same.
    """

    version: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Give `client` the global model: as it is now or, `deferred`, as it is when all arrivals of this
    instant have been handled (a reply after aggregation)."""

    client: str
    deferred: bool = False
    lr: float | None = None
    """Step size of this training; None for the client's own."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Give every client the global model as it is when this instant is over. In a client's receive
    buffer it overwrites an older one. A client that joins later needs a `Send`."""


@dataclass(frozen=True, slots=True)
class Request:
    """Ask `client` for its update: `pull` what lies in its send buffer, or comes next into it;
    `interrupt` its training and send what is done by then. It leaves when this instant is over, after
    the models of this instant."""

    client: str
    what: Literal["pull", "interrupt"]


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Call `timer(name)` once, `after` this event; setting it anew moves it."""

    name: str
    after: Nanoseconds


@dataclass(frozen=True, slots=True)
class SetPeriodicTimer:
    """Call `timer(name)` at every multiple of `period` from now on."""

    name: str
    period: Nanoseconds


@dataclass(frozen=True, slots=True)
class Ignored:
    """The update just handed in changed nothing, because of `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that a reader of the run should know."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class SumUp:
    """With secure aggregation: have the sum of these updates opened. As soon as it is, `State.summed` is
    called; unless a rule has its own, w becomes

        w ← (1 − pull)·w + pull·known + scale·Σ weight_i v_i

    with v_i the updates or, of a `model`, its difference to what it was trained from. Where too few
    clients are left to open it, nothing comes of these updates."""

    contributions: tuple[Contribution, ...]
    """With weights from 0 to 1."""
    scale: float = 1.0
    pull: float = 0.0
    known: Vector | None = None


Action = SumUp | Aggregated | Send | Broadcast | Request | SetTimer | SetPeriodicTimer | Ignored | Remark
Actions = Sequence[Action]


@dataclass(slots=True)
class Server:
    """What every rule works on."""

    w: Vector
    """Global model, shape (d,); changed in place."""
    clients: dict[str, float]
    """Clients that are present, in device order, with their importance p_i."""
    rng: np.random.Generator
    version: int = 0
    began: Nanoseconds = 0
    """Device time at which the run began."""
    population: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Every client of the run, present or not, in device order, with its importance; sums to 1."""
    buffers: Buffers = NONE
    """The global model's. No rule looks at them: the aggregator's core averages them."""
    masked: bool = False
    """Secure aggregation: the vectors of updates are not known. An update's is then what is known of it:
    of kind `model` the model that it was trained from, else nothing, shape (0,). The rule asks for sums
    of them (`SumUp`)."""

    def in_order(self, clients: Container[str]) -> list[str]:
        """Those of `clients` that are present, in device order."""
        return [client for client in self.clients if client in clients]

    def staleness(self, update: Update) -> int:
        """τ = current version − base version."""
        return self.version - update.base_version

    def aggregated(self, used: Iterable[Contribution], scale: float = 1.0) -> Aggregated:
        """Count a new version, made of the updates in `used`, each with `scale` times its weight."""
        self.version += 1
        if scale != 1.0:
            used = (Contribution(c.client, c.dispatch, c.base_version, scale * c.weight) for c in used)
        return Aggregated(self.version, tuple(used))


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums that a rule asks for (`SumUp`)."""

    updates: int
    """In each."""
    weighted: bool = False
    """Whether their weights differ."""


class State(ABC):
    """A rule in a run. `server.clients` is already up to date when `join` and `leave` are called.

    By default every client is sent the model as soon as it is there.
    """

    server: Server

    def start(self) -> Actions:
        """The run clock starts; `server.clients` are ready."""
        return [Send(client) for client in self.server.clients]

    @abstractmethod
    def update(self, update: Update) -> Actions:
        """A valid update of a present client."""

    def join(self, client: str) -> Actions:
        """`client` is ready: for the first time, or back after a crash, an outage or a goodbye. From
        here on it is as any other; no rule shuts it out."""
        return [Send(client)]

    def leave(self, client: str) -> Actions:
        """`client` is gone, and what it was sent with it; it may be back. Updates that it has handed in
        stay where they are."""
        return []

    def retire(self, client: str, memory: Vector | None) -> Actions:
        """`client` says goodbye and hands in its memory, shape (d,), or None where no update of it was
        applied since it joined; `leave` comes next. If it is back later, it joins as a new client."""
        return []

    def timer(self, name: str) -> Actions:
        """A timer that the rule has set is due."""
        return []

    def summed(self, wanted: SumUp, total: Vector) -> Aggregated:
        """What was to be summed up is opened: `total` is Σ weight_i v_i, shape (d,), with the weights in
        `wanted`, which are those that were asked for up to rounding."""
        if wanted.known is not None:
            mix(self.server.w, wanted.known, wanted.pull)
        add_scaled(self.server.w, total, wanted.scale)
        return self.server.aggregated(wanted.contributions, wanted.scale)


class Rule(Protocol):
    """The parameters of a rule: a frozen dataclass whose fields are what a topology may set."""

    paper: ClassVar[str] = ""
    """Where the rule is from: authors, year, and where to read it."""
    equation: ClassVar[str] = ""
    """What becomes of w, in one line."""
    takes_fednova: ClassVar[bool] = False
    """Whether it multiplies an aggregate of normalised deltas by τ_eff, as `local.fednova` needs."""

    @property
    def client_side(self) -> ClientSide:
        """What it asks of its clients."""
        return ClientSide()

    def sums(self) -> Sums:
        """The sums of updates that it can do with, for secure aggregation. Raises ValueError with the
        reason where it cannot."""
        raise ValueError("what it does with each update cannot be done with a sum of several")

    def check(self, clients: int) -> None:
        """Raise ValueError where these parameters cannot work with `clients` clients."""
        return  # a body: what has none is abstract to mypy

    def begin(self, server: Server) -> State: ...

    def begin_client(self, settings: ClientSettings) -> ClientState:
        """Its half at a client. Of kind `residual` a rule needs one of its own."""
        return ClientState(self.client_side, settings)
