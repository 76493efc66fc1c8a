"""What a rule is: a pure state machine on the server. Updates come in, actions go out.

A rule reads no clock and opens no socket; randomness comes from `Server.rng`. It owns the global model
while the run lasts: it changes `server.w` in place and counts `server.version`.

A complete rule (it adds every update at once), to copy from:

    @dataclass(frozen=True)
    class Eager:
        kind: ClassVar[Kind] = "delta"
        server_lr: float = 1.0

        def check(self, clients: int) -> None: ...

        def begin(self, server: Server) -> "EagerState":
            return EagerState(self, server)

    class EagerState:
        def __init__(self, params: Eager, server: Server) -> None:
            self.params, self.server = params, server

        def start(self) -> Actions:
            return [Send(client) for client in self.server.clients]

        def update(self, update: Update) -> Actions:
            weight = self.params.server_lr * self.server.clients[update.client]
            add_scaled(self.server.w, update.vector, weight)
            return [self.server.aggregated([(update, weight)]), Send(update.client)]

        def join(self, client: str) -> Actions:
            return [Send(client)]

        def leave(self, client: str) -> Actions:
            return []

        def timer(self, name: str) -> Actions:
            return []
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np

from agents.vectors import Vector

Kind = Literal["delta", "model"]
"""`delta`: end minus start of local training, so servers add. `model`: its end."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one client sends after local training. `vector` has shape (d,) and is not to be kept."""

    client: str
    dispatch: int
    """The dispatch that it answers: names the update, as no other in the run does."""
    base_version: int
    vector: Vector


@dataclass(frozen=True, slots=True)
class Contribution:
    """The weight that one update was given in an aggregation."""

    client: str
    dispatch: int
    base_version: int
    weight: float


@dataclass(frozen=True, slots=True)
class Aggregated:
    """The global model became `version`; `contributions` went into it."""

    version: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Give `client` the global model: as it is now or, `deferred`, as it is when all arrivals of this
    instant have been handled (a reply after aggregation)."""

    client: str
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Call `timer(name)` after `after` seconds of device time; setting it anew moves it."""

    name: str
    after: float


@dataclass(frozen=True, slots=True)
class Ignored:
    """The update just handed in changed nothing, because of `reason`."""

    reason: str


Action = Aggregated | Send | SetTimer | Ignored
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

    def staleness(self, update: Update | Contribution) -> int:
        """τ = current version − base version."""
        return self.version - update.base_version

    def aggregated(self, used: Iterable[tuple[Update | Contribution, float]]) -> Aggregated:
        """Count a new version, made of the updates in `used` with the weight that each was given."""
        self.version += 1
        return Aggregated(
            self.version,
            tuple(
                Contribution(update.client, update.dispatch, update.base_version, weight)
                for update, weight in used
            ),
        )


class State(Protocol):
    """A rule in a run. `server.clients` is already up to date when `join` and `leave` are called."""

    def start(self) -> Actions:
        """The run clock starts; `server.clients` are ready."""

    def update(self, update: Update) -> Actions:
        """A valid update of a present client."""

    def join(self, client: str) -> Actions:
        """`client` is ready: new, or back after it left."""

    def leave(self, client: str) -> Actions:
        """`client` is gone; an update that it has in flight may still arrive first."""

    def timer(self, name: str) -> Actions:
        """A timer that the rule has set is due."""


class Rule(Protocol):
    """The parameters of a rule: a frozen dataclass whose fields are what a topology may set."""

    kind: ClassVar[Kind]

    def check(self, clients: int) -> None:
        """Raise ValueError where these parameters cannot work with `clients` clients."""

    def begin(self, server: Server) -> State: ...
