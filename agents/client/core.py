"""The client's state machine: events in, actions out. No clock, no socket, no torch.

    idle ──model──▶ training ──trained──▶ thinking ──thought──▶ done ──▶ idle
                       ▲                                         │
                       └──── a model that came meanwhile ────────┘

*Receive buffer*, one place: a model that arrives while the client is busy waits; a newer one overwrites
it. *Send buffer*, one place, if the rule requires one: what is done waits to be pulled, and a newer one
overwrites it (or, with `hold`, nothing is trained before it was fetched). Without one, what is done is
sent. An interrupt ends the training after its current step and sends what there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from agents.models.buffers import NONE, Buffers
from agents.models.vectors import Vector
from agents.pipeline.interface import ClientStep
from agents.rules.client_half import ClientState, Form, SavedVectors
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.payloads import FAREWELL, Encoded, ModelMessage, UpdateMessage

_NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What local training came to."""

    end: Vector
    """w_i^K, shape (d,), not to be changed any more; for a `gradient` rule the gradient at the start."""
    loss: float
    """Mean over the steps; NaN without any."""
    buffers: Buffers = NONE
    """As the training left them."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Local training is done. Times are the client's own clock."""

    outcome: Callable[[], Outcome]
    """Asked for only if the update is sent: in virtual time, what nobody fetches is never computed."""
    steps: int
    started: Nanoseconds
    ended: Nanoseconds


@dataclass(frozen=True, slots=True)
class Train:
    """Run local training from `model`, with the randomness of update `sequence`."""

    model: ModelMessage
    sequence: int


@dataclass(frozen=True, slots=True)
class CutShort:
    """End the training that goes on after its current step, then call `trained`."""


@dataclass(frozen=True, slots=True)
class Think:
    """Wait `duration` of device time, then call `thought`. A newer one replaces it."""

    duration: Nanoseconds


@dataclass(frozen=True, slots=True)
class Remember:
    """Put this on the disk before the update that follows leaves."""

    memory: SavedVectors


@dataclass(frozen=True, slots=True)
class SendUpdate:
    """Send what `message` makes of training `sequence`; it may be called later, once."""

    sequence: int
    message: Callable[[], UpdateMessage]


Action = Train | CutShort | Think | Remember | SendUpdate
Actions = Sequence[Action]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a client is."""

    run: str
    client: str
    samples: int


@dataclass(frozen=True, slots=True)
class _Done:
    """A finished training, not sent yet."""

    sequence: int
    model: ModelMessage
    downloaded: Nanoseconds
    trained: Trained


class ClientCore:
    """One client.

    `think` gets the time since the client could begin the training that has ended (the model was there,
    and the work before it done), and gives the delay before its update is sent. `rule` is the rule's
    half here, and `steps` are what is done to its updates, in order.
    """

    def __init__(
        self,
        identity: Identity,
        think: Callable[[Nanoseconds], Nanoseconds],
        rule: ClientState,
        steps: Sequence[ClientStep] = (),
    ) -> None:
        self._identity = identity
        self._think = think
        self._rule = rule
        self._before_rule = [step for step in steps if step.before_rule]
        self._steps = [step for step in steps if not step.before_rule]
        self._sequence = rule.newest
        self._newest, self._schema = 0, ""
        self._received: tuple[ModelMessage, Nanoseconds] | None = None
        self._working_on: tuple[ModelMessage, Nanoseconds] | None = None
        self._free_since: Nanoseconds = 0
        """When the work before was done, and fetched where the rule wants that."""
        self._trained: Trained | None = None
        self._send_buffer: _Done | None = None
        self._wanted: Literal["pull", "interrupt"] | None = None

    def model(self, message: ModelMessage, at: Nanoseconds) -> Actions:
        """A dispatch arrived, complete at time `at`; one that MQTT delivers a second time is dropped."""
        if message.dispatch <= self._newest:
            return []
        self._newest, self._schema = message.dispatch, message.schema
        self._rule.acknowledge(message)
        # Numbers of a former life, and with them what was drawn for them, are not used again.
        self._sequence = max(self._sequence, message.acknowledged)
        self._received = (message, at)
        return self._begin()

    @property
    def sends_gradients(self) -> bool:
        """Whether the rule takes gradients in place of trainings."""
        return self._rule.side.kind == "gradient"

    @property
    def works_on(self) -> int:
        """The newest dispatch that an update will answer; 0 for none: it waits for a model."""
        held = [at_hand[0] for at_hand in (self._received, self._working_on) if at_hand is not None]
        if self._send_buffer is not None:
            held.append(self._send_buffer.model)
        return max((model.dispatch for model in held), default=0)

    def trained(self, result: Trained) -> Actions:
        """The training that `Train` requested is done, or was cut short."""
        if self._working_on is None:
            raise RuntimeError("trained() without a training")
        self._trained = result
        if self._wanted == "interrupt":
            return self._finish(result.ended)
        begun = max(self._working_on[1], self._free_since)
        return [Think(self._think(result.ended - begun))]

    def thought(self, at: Nanoseconds) -> Actions:
        """The delay that `Think` requested is over, at time `at`; no news after an interrupt."""
        return [] if self._trained is None else self._finish(at)

    def pull(self, at: Nanoseconds) -> Actions:
        """The server wants what lies in the send buffer, or what comes into it next."""
        if self._send_buffer is None:
            self._wanted = self._wanted or "pull"
            return []
        done, self._send_buffer = self._send_buffer, None
        if self._working_on is None:
            self._free_since = at
        return [*self._send(done, at), *self._begin()]

    def interrupt(self, at: Nanoseconds) -> Actions:
        """The server wants what is done by now."""
        if self._send_buffer is not None:
            return self.pull(at)
        if self._working_on is None:
            return [] if self._rule.side.send_buffer is None else self.pull(at)
        self._wanted = "interrupt"
        return [CutShort()] if self._trained is None else self._finish(at)

    def leave(self, at: Nanoseconds) -> list[SendUpdate]:
        """The client says goodbye, at time `at`, and hands in what the rule asks for: not where the
        server is to learn no single model."""
        if any(step.as_sent is not None for step in self._steps):
            return []
        return [
            SendUpdate(sequence, partial(self._farewell, sequence, vector, at))
            for sequence, vector in self._rule.goodbye_models()
        ]

    def _farewell(self, sequence: int, vector: Vector, at: Nanoseconds) -> UpdateMessage:
        identity = self._identity
        return UpdateMessage(
            run=identity.run,
            client=identity.client,
            sequence=sequence,
            dispatch=0,
            base_version=0,
            schema=self._schema,
            kind=FAREWELL,
            samples=identity.samples,
            steps=0,
            effective_steps=0.0,
            loss=math.nan,
            downloaded=at,
            train_start=at,
            train_end=at,
            sent=at,
            vector=vector,
        )

    def _begin(self) -> Actions:
        held = self._rule.side.send_buffer == "hold" and self._send_buffer is not None
        if self._received is None or self._working_on is not None or held:
            return []
        self._working_on, self._received = self._received, None
        self._sequence += 1
        return [Train(self._working_on[0], self._sequence)]

    def _finish(self, at: Nanoseconds) -> Actions:
        """The update is done: send it, or put it into the send buffer."""
        if self._working_on is None or self._trained is None:
            raise RuntimeError("no update to finish")
        done = _Done(self._sequence, *self._working_on, self._trained)
        self._working_on = self._trained = None
        self._free_since = at
        if self._rule.side.send_buffer is not None and self._wanted is None:
            self._send_buffer = done
            return self._begin()
        self._wanted = None
        return [*self._send(done, at), *self._begin()]

    def _send(self, done: _Done, at: Nanoseconds) -> list[Action]:
        model, trained, identity = done.model, done.trained, self._identity
        form = self._rule.form(done.sequence, model, trained.steps, lambda: self._end(done))

        def message() -> UpdateMessage:
            vector, encoded = self._processed(done, form)
            hides_loss = any(step.hides_loss for step in self._steps)
            outcome = trained.outcome()
            return UpdateMessage(
                run=identity.run,
                client=identity.client,
                sequence=done.sequence,
                dispatch=model.dispatch,
                base_version=model.version,
                schema=model.schema,
                kind=form.kind,
                samples=identity.samples,
                steps=trained.steps,
                effective_steps=form.effective_steps,
                loss=math.nan if hides_loss else outcome.loss,
                downloaded=done.downloaded,
                train_start=trained.started,
                train_end=trained.ended,
                sent=at,
                vector=vector,
                encoded=encoded,
                buffers=outcome.buffers,
            )

        remember: list[Action] = [Remember(form.memory)] if form.memory else []
        return [*remember, SendUpdate(done.sequence, message)]

    def _end(self, done: _Done) -> Vector:
        """The end point that the client reports (forged if it is an attacker)."""
        end = done.trained.outcome().end
        if not self._before_rule:
            return end
        progress = end if self.sends_gradients else end - done.model.vector
        for step in self._before_rule:
            changed = step.apply(progress, done.sequence, done.model.dispatch)
            assert not isinstance(changed, Encoded)  # noqa: S101  (the rule needs a vector)
            progress = changed
        return progress if self.sends_gradients else done.model.vector + progress

    def _processed(self, done: _Done, form: Form) -> tuple[Vector, Encoded | None]:
        """The vector of the update, or what it is encoded as."""
        vector = form.vector()
        if not self._steps:
            return vector, None
        model, is_model = done.model, form.kind == "model"
        change: Vector | Encoded = vector - model.vector if is_model else vector
        for step in self._steps:
            assert not isinstance(change, Encoded)  # noqa: S101  (only the last step encodes)
            change = step.apply(change, done.sequence, model.dispatch)
        if isinstance(change, Encoded):
            return _NOTHING, change
        return model.vector + change if is_model else change, None
