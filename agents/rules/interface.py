"""The interface of aggregation rules. A rule is a pure state machine on the server: it receives updates
and returns actions.

A rule reads no clock and opens no socket; randomness comes from `Server.rng`. A rule owns the global
model during the run: it changes `server.w` in place and counts `server.version`.

The same inputs must give the same actions and models, bit by bit. Replay, and resuming after a crash,
depend on this. So nothing may depend on the iteration order of a set of strings. And a state may hold
only what `agents.aggregator.storage` can save: numbers, strings, lists, tuples, dicts, sets, deques,
NumPy arrays, the building blocks in `agents.rules.parts`, and objects of classes at the top level of the
rule's own modules. Loading a snapshot does not call `__init__` of such a class.

A complete rule that can serve as a template. It adds every update immediately:

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
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeGuard, get_args

import numpy as np

from agents.models.vectors import NONE, Buffers, Vector, add_scaled, mix
from agents.rules.client_half import Answer as Answer
from agents.rules.client_half import ClientHalf as ClientHalf
from agents.rules.client_half import ClientSettings as ClientSettings
from agents.rules.client_half import ClientSide as ClientSide
from agents.rules.client_half import ClientState as ClientState
from agents.rules.client_half import Kind as Kind
from agents.rules.client_half import Lengths as Lengths
from agents.rules.client_half import LocalResult as LocalResult
from agents.rules.client_half import Terms as Terms
from agents.rules.client_half import Vectors as Vectors
from agents.timing.nanoseconds import Nanoseconds

RuleDraw = Callable[[np.random.Generator], list[str]]
"""The uniform draw of a rule, as a function of the generator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The update of one client after local training. `vector` has shape (d,). Copy `vector` and
    `vectors` if you keep them: their memory is reused."""

    client: str
    dispatch: int
    """Number of the dispatch that the update answers. No other update of the run has this
    number."""
    base_version: int
    vector: Vector
    kind: Kind = "delta"
    samples: int = 1
    """Number of training samples in the client's shard."""
    steps: int = 1
    """Number of local steps done."""
    effective_steps: float = 1.0
    """FedNova: the effective number of local steps; 1 for a delta that is not normalised. τ_eff is the
    mean of this number over the updates."""
    round_trip: Nanoseconds = 0
    """Time from the dispatch of the model to the arrival of the update, in nanoseconds."""
    dispatched: Nanoseconds = 0
    """Device time at which the model was sent, in nanoseconds."""
    vectors: Vectors = dataclasses.field(default_factory=dict)
    """The vectors that the rule declares in `ClientSide.update_vectors`, by name."""
    base: Vector | None = None
    """The model that the update was trained from, shape (d,); do not change it. None if the rule's
    `keeps_bases` is false."""

    def contribution(self, weight: float) -> Contribution:
        """Return the log entry for the aggregation of this update with `weight`."""
        return Contribution(self.client, self.dispatch, self.base_version, weight)


@dataclass(frozen=True, slots=True)
class Contribution:
    """The weight of one update in an aggregation. Before the aggregation, the weight is known only up to
    a common factor."""

    client: str
    dispatch: int
    base_version: int
    weight: float


@dataclass(frozen=True, slots=True)
class Aggregated:
    """The global model is now `version`, made from the updates in `contributions`.

    Without contributions, this is the end of a round in which no update arrived. The version is then
    unchanged, unless the model changed for another reason.
    """

    version: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Send the present global model to `client`. If `deferred` is true, send the model as it is at the
    end of this instant, after all arrivals have been handled."""

    client: str
    deferred: bool = False
    lr: float | None = None
    """Step size for this local training; None if the client uses its configured step size."""
    vectors: Vectors = dataclasses.field(default_factory=dict)
    """Vectors to send with the model: those that the rule declares in `ClientSide.model_vectors`. Their
    values are copied when the rule returns."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send every present client the global model as it is at the end of this instant. In a client's
    receive buffer, this model replaces an older one. A client that joins later needs a `Send`. A rule
    with `ClientSide.model_vectors` cannot broadcast."""


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """Ask `client` for its update. `pull`: send the update in the send buffer, or the next one if the
    buffer is empty. `interrupt`: stop training and send the result so far. The request is sent at the
    end of this instant, after the models of this instant."""

    client: str
    what: Literal["pull", "interrupt"]


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Call `timer(name)` once, `after` nanoseconds from this event. If the timer is already set, it is
    replaced."""

    name: str
    after: Nanoseconds


@dataclass(frozen=True, slots=True)
class SetPeriodicTimer:
    """Call `timer(name)` from now on at every device time that is a multiple of `period`."""

    name: str
    period: Nanoseconds


@dataclass(frozen=True, slots=True)
class Ignored:
    """The update just received was not used; `reason` says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Remark:
    """A note for people who read the run's log."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class SumUp:
    """Find out the sum of the updates in `contributions`, if the server learns only sums
    (`Server.sums_only`). `State.apply_sum` is called when the sum is known. By default, `apply_sum` does

        w ← (1 − pull)·w + pull·known + scale·Σ weight_i v_i

    v_i is the vector of the update. For an update of kind `model`, v_i is this vector minus the model
    that the update was trained from. If too few clients are left to open the sum, the updates in it are
    discarded.
    """

    contributions: tuple[Contribution, ...]
    """The updates to sum, with weights from 0 to 1."""
    scale: float = 1.0
    """Factor of the sum."""
    pull: float = 0.0
    """Share of `known` in the new model, from 0 to 1."""
    known: Vector | None = None
    """Vector that the server knows without the sum, shape (d,); None if the rule needs no such
    vector."""


Action = (
    SumUp
    | Aggregated
    | Send
    | Broadcast
    | RequestUpdate
    | SetTimer
    | SetPeriodicTimer
    | Ignored
    | Remark
)
Actions = Sequence[Action]
_ACTIONS = get_args(Action)


def is_action_list(returned: object) -> TypeGuard[Actions]:
    """Return whether `returned`, which a rule of the user returned, is a list of actions."""
    return isinstance(returned, list | tuple) and all(isinstance(one, _ACTIONS) for one in returned)


class Chooser(Protocol):
    def draw(
        self,
        idle: Sequence[str],
        count: int,
        of_rule: RuleDraw,
        rng: np.random.Generator,
        version: int,
        *,
        replacement: bool,
    ) -> list[str]:
        """Arguments of `Server.draw`, and the version of the global model."""


@dataclass(slots=True)
class Server:
    """The state that every rule works on: global model, clients, random numbers."""

    w: Vector
    """Global model, shape (d,); changed in place."""
    clients: dict[str, float]
    """Present clients, in device order, with their importance p_i."""
    rng: np.random.Generator
    """The only source of randomness that a rule may use."""
    version: int = 0
    """Version of the global model: number of aggregations so far."""
    began: Nanoseconds = 0
    """Device time at which the run started, in nanoseconds."""
    population: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Importance of every client of the run, present or not, in device order. The values sum to 1."""
    buffers: Buffers = NONE
    """Buffers of the global model (e.g. of batch normalisation). Rules do not use them: the aggregator's
    core averages them."""
    sums_only: bool = False
    """Whether the server learns only sums of updates, for which the rule asks with `SumUp`.
    `Update.vector` is then the model that the update was trained from if the update has the kind
    `model`, and empty, shape (0,), otherwise."""

    draws: Chooser | None = None
    """Chooser of clients in place of the rule; None if the rule draws by itself."""

    def draw(
        self, idle: Sequence[str], count: int, of_rule: RuleDraw, *, replacement: bool = False
    ) -> list[str]:
        """Return the clients that train next: at most `count` of the clients `idle`, which must not be
        empty. If the topology says who is chosen, there may be fewer than `count`, or none;
        `State.redraw` is then called after some time.

        `of_rule`: function that draws uniformly, as the rule does it by itself.
        `replacement`: whether the rule counts a client that is returned several times as often.
        """
        if self.draws is None:
            return of_rule(self.rng)
        return self.draws.draw(idle, count, of_rule, self.rng, self.version, replacement=replacement)

    def in_device_order(self, clients: Container[str]) -> list[str]:
        """Return the present clients among `clients`, in device order."""
        return [client for client in self.clients if client in clients]

    def staleness(self, update: Update) -> int:
        """Return τ = current version − base version of `update`."""
        return self.version - update.base_version

    def aggregated(self, used: Iterable[Contribution], scale: float = 1.0) -> Aggregated:
        """Count a new version, which was made from the updates in `used`. Return the entry for the log,
        in which the weights of `used` are multiplied by `scale`."""
        self.version += 1
        if scale != 1.0:
            used = (Contribution(c.client, c.dispatch, c.base_version, scale * c.weight) for c in used)
        return Aggregated(self.version, tuple(used))


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums that a rule asks for with `SumUp`."""

    updates: int
    """Number of updates per sum."""
    weighted: bool = False
    """Whether the updates of a sum have different weights."""


class State(ABC):
    """The server half of a rule during a run. `server.clients` is already up to date when `join` and
    `leave` are called.

    By default every client gets the model as soon as it is present.
    """

    server: Server

    def start(self) -> Actions:
        """Handle the start of the run clock. All of `server.clients` are ready."""
        return [Send(client) for client in self.server.clients]

    @abstractmethod
    def update(self, update: Update) -> Actions:
        """Handle a valid update of a present client."""

    def join(self, client: str) -> Actions:
        """Handle the join of `client`, which is ready for the first time, or again after a crash, an
        outage or a goodbye. From now on, the rule must treat this client like any other client."""
        return [Send(client)]

    def leave(self, client: str) -> Actions:
        """Handle the leave of `client`. The client will not answer the model that it was sent, but it
        may join again. Its updates that have already arrived stay in the rule's buffers."""
        return []

    def lose_work(self, client: str) -> Actions:
        """Handle the loss of the work of `client`, for example because its update was rejected. The
        client will not answer the models that it was sent, and waits for another one. Unlike a client
        that leaves, it is in `server.clients` throughout."""
        return [*self.leave(client), *self.join(client)]

    def retire(self, client: str, memory: Vector | None) -> Actions:
        """Handle the goodbye of `client`. `memory` is the vector that the client sends back, shape
        (d,); None if no update of `client` was applied since `client` joined. `leave` is called
        next. If the client returns later, it joins as a new client."""
        return []

    def timer(self, name: str) -> Actions:
        """Handle the expiry of a timer that the rule has set."""
        return []

    def redraw(self) -> Actions:
        """Handle the time to draw again, because the last `Server.draw` found fewer clients than wanted
        and than were idle."""
        return []

    def apply_sum(self, request: SumUp, total: Vector) -> Aggregated:
        """Apply the sum of updates that `request` asked for: `total` is Σ weight_i v_i, shape
        (d,). The weights in `request` are the rounded ones that were used in the sum."""
        if request.known is not None:
            mix(self.server.w, request.known, request.pull)
        add_scaled(self.server.w, total, request.scale)
        return self.server.aggregated(request.contributions, request.scale)


class Rule(Protocol):
    """The parameters of a rule: a frozen dataclass whose fields are the keys that a topology may set."""

    paper: ClassVar[str] = ""
    """Source of the rule: authors, year, and where to read it."""
    equation: ClassVar[str] = ""
    """Formula for the change of w, in one line."""
    takes_fednova: ClassVar[bool] = False
    """Whether the rule multiplies an aggregate of normalised deltas by τ_eff. The setting
    `local.fednova` requires such a rule."""
    keeps_bases: ClassVar[bool] = False
    """Whether the rule gets the model that each update was trained from, as `Update.base`. The server
    then keeps every version that a client may still answer."""

    assumes_uniform: ClassVar[str] = ""
    """Result of theory that holds only if clients are drawn uniformly, as a clause; empty if there is
    none."""

    @property
    def draws(self) -> bool:
        """Whether the rule, with these parameters, draws clients with `Server.draw`. Only then can the
        topology say who is chosen."""
        return False

    @property
    def client_side(self) -> ClientSide:
        """Requirements of the rule on its clients."""
        return ClientSide()

    def sums(self) -> Sums:
        """Return the sums of updates that the rule asks for if the server learns only sums. Raise
        ValueError with the reason if the rule cannot work on sums."""
        raise ValueError("the rule needs every single update, not only a sum of several")

    def check(self, clients: int) -> None:
        """Raise ValueError if these parameters cannot work with `clients` clients."""
        return  # mypy takes a method without a body as abstract

    def begin(self, server: Server) -> State:
        """Return the server half of the rule, at the start of a run."""
        ...

    def begin_client(self, settings: ClientSettings) -> ClientState:
        """Return the client half of the rule. A rule of kind `residual` must override this method. A
        rule with vectors, memory or terms returns a `ClientHalf`."""
        return ClientState(self.client_side, settings)
