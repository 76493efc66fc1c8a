"""Interface of the steps that process an update between local training and the aggregation rule.

A step is a frozen dataclass of its parameters. It has a client half and may have a server half, which
decodes updates or adds noise. Each client applies its steps in the order of `pipeline.steps.STEPS`. The
last step may encode the update (`agents.wire.payloads.Encoded`); the server half of that step decodes
the update.

An example of a complete step, which sends the sign of each coordinate and one scale for all coordinates:

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
from typing import Any, ClassVar, Protocol

import numpy as np

from agents.aggregator.actions import Action
from agents.aggregator.part import CorePart, PartHost
from agents.models.vectors import Vector
from agents.rules.interface import SumUp
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.payloads import Encoded, UpdateMessage

Wanted = Sequence[tuple[str, int, int]]
"""Client, dispatch and weight of each update in a sum that the server requests."""
BASE_LACKS = "the model that it was trained from is not kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientContext:
    """The client for which a step's client half is made."""

    run: str
    name: str
    parameters: int
    """d, number of the model's parameters."""
    rng: Callable[..., np.random.Generator]
    """Function that returns one of the client's random generators. Its arguments are a purpose (a
    constant of `agents.random_generators`) and a number, such as the number of an update."""
    simulated: bool = False
    """Whether the client runs in virtual time, where no secrets are needed."""


class ClientStep(ABC):
    """Client half of a step; one object per client process."""

    before_rule: ClassVar[bool] = False
    """If true, `apply` gets the progress of training (the gradient for a `gradient` rule), before the
    rule's client half makes an update from it. If false, `apply` gets the update; for an update of kind
    `model`, it gets the difference to the model that training started from."""
    hides_loss: bool = False
    """Whether the local loss must not be sent, because the server is not trusted."""

    @abstractmethod
    def apply(self, progress: Vector, sequence: int, dispatch: int) -> Vector | Encoded:
        """Return the vector or the encoded update that is sent instead of `progress`, shape (d,).
        `sequence` is the number of the update; `dispatch` is the number of the dispatch that the update
        answers. Do not change `progress` in place."""

    def for_vector(self, size: int) -> ClientStep | None:
        """Return the client half that encodes one of the rule's own vectors, shape (size,), which is
        declared `compressed`. Return None if this step leaves such vectors as they are."""
        return None

    exchange: Exchange | None = None
    """Exchange of messages between clients; None if the step needs no such messages."""
    simulated_exchange: SimulatedExchange | None = None
    """Exchange of messages between clients in virtual time; None if the step needs no such messages."""
    as_sent: Callable[[int, int, Vector], Vector] | None = None
    """Function that returns the vector, shape (d,), that the server will add to its sum for an update.
    The vector differs from the update because the step rounds and cuts values. The arguments are the
    sequence number, the dispatch and the update. Rules whose clients remember what they sent need this
    function. None if the server learns every single update. If the function is set, the server learns
    only sums, and an update may be lost after it has arrived."""


class PeerError(Exception):
    """A message of another client or a request of the server is invalid; the text says why."""


class Exchange(Protocol):
    """Messages that a step exchanges between clients, and the step's answers to the server.

    `add_peer` and `receive_share` may be called in a different thread than the other methods."""

    @property
    def public(self) -> bytes:
        """Public key of this client process; all other clients pass it to `add_peer`."""

    @property
    def share_size(self) -> int:
        """Length of each message between clients, in bytes."""

    def add_peer(self, client: str, key: bytes) -> None:
        """Store the public key of `client`. Raises PeerError."""

    def prepare(self, dispatch: int) -> Iterator[tuple[str, bytes]]:
        """Prepare the update that will answer `dispatch`. Yield the name of each other client, and the
        message for that client."""

    def note_preparation_time(self, dispatch: int, took: Nanoseconds) -> None:
        """Record the time that it took to prepare the update for `dispatch` and to send the messages."""

    def receive_share(self, sender: str, payload: bytes | bytearray) -> None:
        """Handle a message of the client `sender`. Raises PeerError."""

    def answer(self, number: int, wanted: Wanted) -> bytes:
        """Return the answer to request `number` of the server. Raises PeerError."""


class SimulatedExchange(Protocol):
    """Messages that a step exchanges between clients in virtual time. The messages have a size but no
    content."""

    share_size: int
    """Length of each message between clients, in bytes."""

    def prepare(self, dispatch: int, present: Iterable[str], took: Nanoseconds) -> int:
        """Prepare the update that will answer `dispatch`; return the number of other clients that get a
        message. `present`: clients that are present. `took`: duration of the preparation in
        nanoseconds."""

    def receive_share(self, sender: str, dispatch: int) -> None:
        """Handle the message of the client `sender` about its `dispatch`."""

    def answer(self, number: int, wanted: Wanted) -> bytes:
        """Return the answer to request `number` of the server."""


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """CPU time of an exchange at a client, in seconds on one whole core of this host."""

    prepare: float = 0.0
    """Seconds to prepare an update and to apply the step to it."""
    share: float = 0.0
    """Seconds per message sent to or received from another client."""
    answer: float = 0.0
    """Seconds per answer to the server."""


NO_EXCHANGE = ExchangeCost()


class ServerStep(CorePart):
    """Server half of a step; one object per run."""

    sums_only: ClassVar[str] = ""
    """Reason to reject an update that this step has not encoded, because the server may learn only sums
    of updates; empty if it may learn each. At most one step of a run is such a step. Its `receive` keeps
    the update, and returns no vector of it."""
    answer_size: int | None = None
    """Maximum size in bytes of a client's answer to this step's requests; None if it has none."""

    def receive(
        self, client: str, message: UpdateMessage, encoded: Encoded, base: Vector | None
    ) -> Vector | str:
        """Return the vector of an update that has passed all other checks, or the reason to reject it.
        `base`: the model that the update was trained from; None if that model is not kept."""
        try:
            vector = self.decode(encoded)
        except (LookupError, ValueError) as error:
            return str(error)
        if message.kind == "model":
            if base is None:
                return f"{BASE_LACKS}, so the encoded difference to it is useless"
            vector += base
        return vector

    def decode(self, encoded: Encoded) -> Vector:
        """Return the encoded vector as a new float32 array. Raises ValueError or LookupError if the
        encoded update is invalid."""
        raise NotImplementedError

    def record_fields(self, client: str, dispatch: int) -> dict[str, Any]:
        """Return what the step knows of an update for its record (`agents.events.UpdateApplied`)."""
        return {}

    def sum_up(self, wanted: SumUp, at: Nanoseconds, core: PartHost) -> list[Action]:
        """Begin the sum that the rule has requested. Called only for a step with `sums_only`."""
        return []

    def for_vector(self, size: int) -> ServerStep | None:
        """Return the server half that decodes one of the rule's own vectors, shape (size,). Return None
        if this step encodes no such vectors."""
        return None

    def add_noise(self, w: Vector, version: int, weight: float) -> None:
        """Add noise in place to the new global model `w`, shape (d,), which is version `version`.
        `weight`: the largest weight among the updates in this version."""


class UpdateStep(ABC):
    """Base class of the steps. Each step is a frozen dataclass of its parameters."""

    field: ClassVar[str | None] = None
    """Header field that marks updates encoded by this step; None if the step does not encode."""

    @abstractmethod
    def at_client(self, client: ClientContext) -> ClientStep:
        """Make the client half."""

    def at_server(self, parameters: int) -> ServerStep | None:
        """Make the server half, for models with `parameters` parameters. Return None if the step has no
        server half."""
        return None

    def memory(self, model: int, *, remembers: bool) -> int:
        """Return the bytes that the step adds to a client's memory, for a model of `model` bytes.
        `remembers`: whether the rule's clients remember what they sent."""
        return 0

    def exchange_cost(self, parameters: int) -> ExchangeCost:
        """Measure the CPU time of the step's exchange on this host, for models with `parameters`
        parameters."""
        return NO_EXCHANGE

    def waiting_models(self) -> tuple[float, int]:
        """Return how much the broker may hold for a client of what clients send to each other, in sizes
        of a model, and how many clients may fill a queue with the largest messages."""
        return 0.0, 1

    def exchanged_bytes(self, parameters: int) -> int:
        """Return the bytes that a client sends to other clients per round. The client receives the
        same number of bytes."""
        return 0
