"""The client's state machine: events in, actions out. No clock, no socket, no torch.

    idle ──model──▶ training ──trained──▶ thinking ──thought──▶ done ──▶ idle
                       ▲                                         │
                       └──── a model that came meanwhile ────────┘

*Receive buffer*: one model that arrived while the client was busy. A newer model replaces it. *Send
buffer*, if the rule requires one: one finished update that waits until the server pulls it. A newer
update replaces it. With `hold`, no training begins before the update is pulled. Without a send buffer,
each update is sent when it is finished. An interrupt ends the training after its current step, and the
update of the unfinished training is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from agents.models.vectors import NONE, Buffers, Vector
from agents.pipeline.interface import ClientStep
from agents.rules.client_half import (
    NO_TERMS,
    ClientState,
    Form,
    KeptMemory,
    SavedVectors,
    Terms,
    Vectors,
)
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.payloads import FAREWELL, Encoded, ModelMessage, UpdateMessage

_NOTHING = np.zeros(0, np.float32)
FIT_MEMORY = "fit:"
"""Prefix of names under which the memory of a task's own `fit` is saved."""


@dataclass(frozen=True, slots=True)
class Outcome:
    end: Vector
    """End point w_i^K, shape (d,), read-only; for a rule of gradients the gradient at the start."""
    loss: float
    """Mean over the steps; NaN if no step was done."""
    buffers: Buffers = NONE
    memory: Vectors = field(default_factory=dict)
    """Memory of the task's own `fit` after the training."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Times are in nanoseconds on the client's own clock."""

    outcome: Callable[[], Outcome]
    """Called only if the update is sent. So in virtual time, an update that is never sent is never
    computed."""
    steps: int
    started: Nanoseconds
    ended: Nanoseconds


@dataclass(frozen=True, slots=True)
class Train:
    """Train from `model`, with the random generator of update `sequence`."""

    model: ModelMessage
    sequence: int
    """Sequence number of the update, counted from 1 over all processes of the client."""
    terms: Terms = NO_TERMS
    """Terms that the rule adds to the objective."""
    memory: Vectors = field(default_factory=dict)
    """Memory of the task's own `fit`."""


@dataclass(frozen=True, slots=True)
class CutShort:
    """End the running training after its current step, then call `on_trained`."""


@dataclass(frozen=True, slots=True)
class Think:
    """Wait, then call `on_thought`. A newer `Think` replaces this one."""

    duration: Nanoseconds


@dataclass(frozen=True, slots=True)
class Remember:
    """Write to the disk before the next update is sent."""

    memory: SavedVectors


@dataclass(frozen=True, slots=True)
class SendUpdate:
    sequence: int
    message: Callable[[], UpdateMessage]
    """Makes the message. Called at most once, possibly some time after this action was returned."""


Action = Train | CutShort | Think | Remember | SendUpdate
Actions = Sequence[Action]


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    run: str
    client: str
    samples: int


@dataclass(frozen=True, slots=True)
class _Done:
    """The update is not sent yet."""

    sequence: int
    model: ModelMessage
    downloaded: Nanoseconds
    trained: Trained


class ClientCore:
    """State machine of one client.

    `think`: delay between the end of a training and the sending of its update, by the time from the
    arrival of the model (or from the end of earlier work, if that was later) to the end of the training.
    `rule`: its client half. `steps`: of the update pipeline, in order. `fit_memory`: of the task's own
    `fit`, if it has one, under the rules for memory in `agents.rules.client_half.ClientHalf`.
    """

    def __init__(
        self,
        identity: ClientIdentity,
        think: Callable[[Nanoseconds], Nanoseconds],
        rule: ClientState,
        steps: Sequence[ClientStep] = (),
        fit_memory: KeptMemory | None = None,
    ) -> None:
        self._identity = identity
        self._think = think
        self._rule = rule
        self._before_rule = [step for step in steps if step.before_rule]
        self._steps = [step for step in steps if not step.before_rule]
        self._vector_steps: dict[str, ClientStep | None] = {}
        """Step that encodes each of the rule's own vectors; None for one that is sent whole."""
        self._fit_memory = fit_memory
        self._sequence = max(rule.newest, 0 if fit_memory is None else fit_memory.newest)
        self._newest, self._schema = 0, ""
        self._received: tuple[ModelMessage, Nanoseconds] | None = None
        self._working_on: tuple[ModelMessage, Nanoseconds] | None = None
        self._free_since: Nanoseconds = 0
        """Since when the client could begin a training: the previous update was finished or, if the rule
        requires it, pulled."""
        self._trained: Trained | None = None
        self._send_buffer: _Done | None = None
        self._wanted: Literal["pull", "interrupt"] | None = None

    def on_model(self, message: ModelMessage, at: Nanoseconds) -> Actions:
        """A model that MQTT delivers twice is ignored."""
        if message.dispatch <= self._newest:
            return []
        self._newest, self._schema = message.dispatch, message.schema
        self._rule.acknowledge(message)
        if self._fit_memory is not None:
            self._fit_memory = self._fit_memory.acknowledged(message.acknowledged)
        # Numbers of an earlier process are not reused, because a number fixes the update's random draws.
        self._sequence = max(self._sequence, message.acknowledged)
        self._received = (message, at)
        return self._begin()

    @property
    def sends_gradients(self) -> bool:
        return self._rule.side.kind == "gradient"

    @property
    def works_on(self) -> int:
        """Newest dispatch that an update of this client will answer; 0 if it waits for a model."""
        held = [at_hand[0] for at_hand in (self._received, self._working_on) if at_hand is not None]
        if self._send_buffer is not None:
            held.append(self._send_buffer.model)
        return max((model.dispatch for model in held), default=0)

    def on_trained(self, result: Trained) -> Actions:
        """The training was finished or interrupted."""
        if self._working_on is None:
            raise RuntimeError("on_trained() without a training")
        self._trained = result
        if self._wanted == "interrupt":
            return self._finish(result.ended)
        begun = max(self._working_on[1], self._free_since)
        return [Think(self._think(result.ended - begun))]

    def on_thought(self, at: Nanoseconds) -> Actions:
        """Do nothing if an interrupt has sent the update already."""
        return [] if self._trained is None else self._finish(at)

    def pull(self, at: Nanoseconds) -> Actions:
        """If the send buffer is empty, send the next update when it is finished."""
        if self._send_buffer is None:
            self._wanted = self._wanted or "pull"
            return []
        done, self._send_buffer = self._send_buffer, None
        if self._working_on is None:
            self._free_since = at
        return [*self._send(done, at), *self._begin()]

    def interrupt(self, at: Nanoseconds) -> Actions:
        """A running training ends after its current step, and its update is sent."""
        if self._send_buffer is not None:
            return self.pull(at)
        if self._working_on is None:
            return [] if self._rule.side.send_buffer is None else self.pull(at)
        self._wanted = "interrupt"
        return [CutShort()] if self._trained is None else self._finish(at)

    def leave(self, at: Nanoseconds) -> list[SendUpdate]:
        """Farewell messages: the vectors that the rule asks for; none if the server must not learn
        single updates."""
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
        model = self._working_on[0]
        memory = {} if self._fit_memory is None else self._fit_memory.present
        return [Train(model, self._sequence, self._rule.begin(model), memory)]

    def _finish(self, at: Nanoseconds) -> Actions:
        """Send the update, or put it into the send buffer."""
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
                vectors={name: self._encoded(name, v, done) for name, v in form.vectors.items()},
            )

        memory = {**(form.memory or {}), **self._saved_fit_memory(done)}
        remember: list[Action] = [Remember(memory)] if memory else []
        return [*remember, SendUpdate(done.sequence, message)]

    def _saved_fit_memory(self, done: _Done) -> SavedVectors:
        """Store the memory of the task's own `fit`. Return the vectors to save on the disk."""
        if self._fit_memory is None:
            return {}
        if memory := done.trained.outcome().memory:
            self._fit_memory = self._fit_memory.after(done.sequence, memory)
        saved = self._fit_memory.saved
        return {FIT_MEMORY + name: each for name, each in saved.items()}

    def _end(self, done: _Done) -> Vector:
        """An attacker reports a forged end point."""
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
        """Apply all steps. Return the vector and None, or an empty vector and the encoded update."""
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

    def _encoded(self, name: str, vector: Vector, done: _Done) -> Vector | Encoded:
        """Encoded if the vector is declared `compressed` and a step compresses such vectors."""
        if name not in self._rule.side.compressed:
            return vector
        if name not in self._vector_steps:
            made = (step.for_vector(vector.size) for step in self._steps)
            self._vector_steps[name] = next((step for step in made if step is not None), None)
        step = self._vector_steps[name]
        return vector if step is None else step.apply(vector, done.sequence, done.model.dispatch)
