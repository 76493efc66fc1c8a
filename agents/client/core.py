"""The client's state machine: events in, actions out. No clock, no socket, no torch.

    idle ──model──▶ training ──trained──▶ thinking ──timer──▶ idle, update sent
                       ▲                                        │
                       └── a model that came meanwhile ─────────┘

A model that arrives while the client is busy waits in a receive buffer of one place; a newer one
overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agents.vectors import Vector
from agents.wire import ModelMessage, UpdateMessage


@dataclass(frozen=True, slots=True)
class Trained:
    """Local training is done. Times are the client's own clock, in seconds."""

    vector: Vector
    steps: int
    loss: float
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class Train:
    """Run local training from `model`, with the randomness of update `sequence`."""

    model: ModelMessage
    sequence: int


@dataclass(frozen=True, slots=True)
class Think:
    """Wait `seconds` of device time, then call `thought`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class SendUpdate:
    update: UpdateMessage


Action = Train | Think | SendUpdate
Actions = Sequence[Action]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a client is, as its updates say."""

    run: str
    client: str
    kind: str
    samples: int


class ClientCore:
    """One client. `think` draws the extra delay before an update is sent, in seconds."""

    def __init__(self, identity: Identity, think: Callable[[], float]) -> None:
        self._identity = identity
        self._think = think
        self._sequence = 0
        self._newest = 0
        self._received: tuple[ModelMessage, float] | None = None
        self._working_on: tuple[ModelMessage, float] | None = None
        self._trained: Trained | None = None

    def model(self, message: ModelMessage, at: float) -> Actions:
        """A dispatch arrived, complete at time `at`; one that MQTT delivers a second time is dropped."""
        if message.dispatch <= self._newest:
            return []
        self._newest = message.dispatch
        self._received = (message, at)
        return [] if self._working_on else self._begin()

    def trained(self, result: Trained) -> Actions:
        """The training that `Train` asked for is done."""
        self._trained = result
        return [Think(self._think())]

    def thought(self, at: float) -> Actions:
        """The delay that `Think` asked for is over, at time `at`."""
        if self._working_on is None or self._trained is None:
            raise RuntimeError("thought() without a trained update")
        model, downloaded = self._working_on
        trained = self._trained
        update = UpdateMessage(
            run=self._identity.run,
            client=self._identity.client,
            sequence=self._sequence,
            dispatch=model.dispatch,
            base_version=model.version,
            schema=model.schema,
            kind=self._identity.kind,
            samples=self._identity.samples,
            steps=trained.steps,
            loss=trained.loss,
            downloaded=downloaded,
            train_start=trained.started,
            train_end=trained.ended,
            sent=at,
            vector=trained.vector,
        )
        self._working_on = self._trained = None
        return [SendUpdate(update), *self._begin()]

    def _begin(self) -> Actions:
        if self._received is None:
            return []
        self._working_on, self._received = self._received, None
        self._sequence += 1
        return [Train(self._working_on[0], self._sequence)]
