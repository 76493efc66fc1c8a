"""Steps of what is done to an update between local training and the aggregation rule.

A step is a frozen dataclass of its parameters. It has a half at each client and, if the server has to
undo or add something, a half there. Each client does its steps in the order of `agents.pipeline.STEPS`.
The last one may encode the update (`agents.wire.payloads.Encoded`), and its server half decodes it.

A complete step, to copy from. It sends the sign of each coordinate and one scale for all:

    @dataclass(frozen=True)
    class Signs(UpdateStep):
        field: ClassVar[str | None] = "signs"
        scale: float = 0.01

        def at_client(self, client: ClientContext) -> ClientStep:
            return SignsAtClient(self.scale)

        def at_server(self, parameters: int) -> ServerStep:
            return SignsAtServer()

    class SignsAtClient(ClientStep):
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def apply(self, progress: Vector, sequence: int, dispatch: int) -> Encoded:
            return Encoded({"signs": repr(self.scale)}, {"w": np.sign(progress).astype(np.int8)})

    class SignsAtServer(ServerStep):
        def decode(self, encoded: Encoded) -> Vector:
            return encoded.arrays["w"] * np.float32(encoded.fields["signs"])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from agents.models.vectors import Vector
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.payloads import Encoded, UpdateMessage

Wanted = Sequence[tuple[str, int, int]]
"""Client, dispatch and weight of each update that the server asks about."""
Words = NDArray[np.uint32]
BASE_LACKS = "the model that it was trained from is not kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientContext:
    """The client that a step is done at."""

    run: str
    name: str
    parameters: int
    """d."""
    rng: Callable[..., np.random.Generator]
    """Makes the client's generator for a purpose (`agents.client.randomness`) and a number."""
    simulated: bool = False
    """Whether it runs in virtual time, where nothing has to be kept from anybody."""


class ClientStep(ABC):
    """A step at one client, for the life of its process."""

    before_rule: ClassVar[bool] = False
    """Whether it is done to the progress of training (for a `gradient` rule the gradient), before the
    rule's client half makes an update of that; else to the update or, if that is a model, to its
    difference to the model that training began from."""
    hides_loss: bool = False
    """Whether the local loss must not be sent, because the server is not trusted."""

    @abstractmethod
    def apply(self, progress: Vector, sequence: int, dispatch: int) -> Vector | Encoded:
        """Return what is sent in place of `progress`, shape (d,), which is not to be changed, in update
        `sequence`, which answers `dispatch`."""

    exchange: Exchange | None = None
    """Its messages to other clients; None: it sends none."""
    simulated_exchange: SimulatedExchange | None = None
    """The same in virtual time."""
    as_sent: Callable[[int, int, Vector], Vector] | None = None
    """Returns what the server may learn of the change in update `sequence` that answers `dispatch`, for
    a client that remembers it. None: every update arrives whole. Else the server learns no single
    update, and one may be lost after it has arrived."""


class PeerError(Exception):
    """A message of another client, or a request of the server, that a client does not answer; the text
    says why."""


class Exchange(Protocol):
    """Messages of a step between clients, and its answers to the server.

    `add_peer` and `receive_share` may be called in another thread than the other methods."""

    @property
    def public(self) -> bytes:
        """Public key of the client's process, which all others are to `add_peer`."""

    @property
    def share_size(self) -> int:
        """Bytes of each message that others `receive_share`."""

    def add_peer(self, client: str, key: bytes) -> None:
        """`client` is there with this public key. Raises PeerError."""

    def prepare(self, dispatch: int) -> Iterator[tuple[str, bytes]]:
        """Prepare the update that will answer `dispatch`; yield other clients and a message for each."""

    def note_preparation_time(self, dispatch: int, took: Nanoseconds) -> None:
        """Note that it took so long until the messages that are about `dispatch` were on their way."""

    def receive_share(self, sender: str, payload: bytes | bytearray) -> None:
        """Take a message of another client. Raises PeerError."""

    def answer(self, number: int, wanted: Wanted) -> bytes:
        """The answer to request `number` of the server. Raises PeerError."""


class SimulatedExchange(Protocol):
    """The same in virtual time, where messages have a size and no content."""

    share_size: int

    def prepare(self, dispatch: int, present: Iterable[str], took: Nanoseconds) -> int:
        """Prepare the update that will answer `dispatch`, with the clients that are `present`; return
        the number of other clients that get a message."""

    def receive_share(self, sender: str, dispatch: int) -> None:
        """Take the message of `sender` about `dispatch`."""

    def answer(self, wanted: Wanted) -> tuple[int, Words | None]:
        """Bytes of the answer to the server, and its content, None if the client cannot give it."""


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """CPU seconds of an exchange at a client, on one whole core of this host."""

    prepare: float = 0.0
    """To prepare an update, and to apply the step to it."""
    share: float = 0.0
    """Of each message that is sent to another client or taken."""
    answer: float = 0.0
    """Of each answer to the server."""


NO_EXCHANGE = ExchangeCost()


class ServerStep:
    """A step at the server, for the life of a run. It is part of the core's state
    (`agents.aggregator.snapshot`)."""

    def receive(
        self, client: str, message: UpdateMessage, encoded: Encoded, base: Vector | None
    ) -> Vector | str:
        """The vector of an update that has passed all other checks, or why there is none; `base` is the
        model that it was trained from, if that is kept."""
        try:
            vector = self.decode(encoded)
        except (LookupError, ValueError) as error:
            return str(error)
        if message.kind == "model":
            if base is None:
                return f"{BASE_LACKS}: it is encoded as the difference to that"
            vector += base
        return vector

    def decode(self, encoded: Encoded) -> Vector:
        """The vector that was encoded, float32 and the caller's own. Raises ValueError, or LookupError,
        if there is none."""
        raise NotImplementedError

    def add_noise(self, w: Vector, version: int, weight: float) -> None:
        """Add noise to `w`, in place: `version` was made, of updates of which the heaviest has this
        weight."""


class UpdateStep(ABC):
    """Parameters of a step: a frozen dataclass whose fields are what a run sets."""

    field: ClassVar[str | None] = None
    """Name of the header's field by which updates that the step has encoded are known; None: it encodes
    none."""

    @abstractmethod
    def at_client(self, client: ClientContext) -> ClientStep:
        """The step's half at a client."""

    def at_server(self, parameters: int) -> ServerStep | None:
        """The step's half at the server, for models with so many parameters; None: there is none."""
        return None

    def memory(self, model: int, *, remembers: bool) -> int:
        """Bytes that it adds to a client's memory, with a model of `model` bytes, under a rule whose
        clients do or do not remember what they sent."""
        return 0

    def exchange_cost(self, parameters: int) -> ExchangeCost:
        """Measure here what its exchange costs a client, with so many parameters."""
        return NO_EXCHANGE

    def exchanged_bytes(self, parameters: int) -> int:
        """Bytes that a client sends to others in each round, and gets from them."""
        return 0
