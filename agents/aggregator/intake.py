"""Checks of arriving updates, and the decision to pass each to the rule or to reject it. No I/O and no
clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from agents import events
from agents.aggregator.actions import Action, Log
from agents.aggregator.clients import Sending, unfinished
from agents.aggregator.dispatches import Dispatched, NoAnswer
from agents.aggregator.inputs import Settings, UpdateArrived
from agents.aggregator.progress import Ending, RunProgress
from agents.models.vectors import DIVERGED, Vector, finite, norm, unfit
from agents.mqtt.rate_limit import RateLimit
from agents.pipeline.steps import ServerSteps
from agents.rules.client_half import sizes, unfit_vectors
from agents.rules.interface import Kind, Server, Update, Vectors
from agents.texts import make_printable
from agents.timing.nanoseconds import Nanoseconds, to_seconds
from agents.wire.messages import Acknowledgement
from agents.wire.payloads import Encoded, UpdateMessage

MAX_COUNT = 2**63 - 1
"""Largest integer that the records' tables can hold."""
_MAX_EFFECTIVE_STEPS = 1e12
"""A rule multiplies vectors of norm up to 1.8e19 by an update's `effective_steps`; the limit keeps the
model finite."""
_MAX_LOSS = 3.5e38
"""Largest finite loss. NaN means that there is none; infinity that it overflowed."""


class Validation:
    def __init__(self, settings: Settings, server: Server, steps: ServerSteps) -> None:
        self._settings = settings
        self._server = server
        self._steps = steps
        self._kinds = settings.side.kinds
        self._own_sizes = sizes(settings.side.update_vectors, server.w.size)
        """Elements of each vector that an update has for the rule."""
        self._is_bounded = settings.bounds.staleness is not None or settings.bounds.over_norm == "drop"

    def check(
        self,
        event: UpdateArrived,
        dispatch: Dispatched,
        base: Vector | None,
        begin: Nanoseconds,
        end: Nanoseconds,
    ) -> UpdateMessage | str:
        """Return the update with its decoded vector, or the reason to reject it. `base`: the dispatched
        model, if a copy is kept. `begin`, `end`: client's clock when the model was sent and the update
        arrived."""
        message, settings = event.message, self._settings
        if message.kind not in self._kinds:
            return f"kind {message.kind}, expected {settings.side.kind}"
        if message.schema != settings.schema:
            return f"another model: schema {message.schema}, expected {settings.schema}"
        expected, found = self._server.buffers, message.buffers
        if found is not expected and (problem := expected.unfit(found)) is not None:
            return problem
        if message.base_version != dispatch.version:
            return f"base version {message.base_version}, expected {dispatch.version}"
        planned = settings.samples.get(event.sender, message.samples)
        if message.samples != planned:
            return f"{message.samples} samples, expected {planned} as in its shard"
        problem = _impossible_field(message, begin, end)
        if problem is None and self._is_bounded:
            problem = self._too_stale(dispatch)
        if problem is not None:
            return problem
        if message.vectors or self._own_sizes:
            vectors = self._own_vectors(message)
            if isinstance(vectors, str):
                return vectors
            message = replace(message, vectors=vectors)
        if message.encoded is None:
            if self._steps.sums is not None:
                return self._steps.sums.sums_only
        else:
            vector = self._steps.decode(event.sender, message, message.encoded, base)
            if isinstance(vector, str):
                return vector
            message = replace(message, vector=vector)
            if self._steps.sums is not None:
                return message  # it has no vector to check, and the step keeps it from here on
        problem = unfit(message.vector, self._server.w)
        return problem or (self._is_bounded and self._too_long(message)) or message

    def _own_vectors(self, message: UpdateMessage) -> Vectors | str:
        """In the order in which the rule declares them, or the reason to reject the update."""
        decoded: dict[str, Vector] = {}
        for name, vector in message.vectors.items():
            found: Vector | str = np.zeros(0, np.float32)  # a name that is not declared
            if not isinstance(vector, Encoded):
                found = vector
            elif name in self._settings.side.compressed:
                found = self._steps.decode_vector(vector, self._own_sizes[name])
            elif name in self._own_sizes:
                found = "encoded, but it is declared to be sent whole"
            if isinstance(found, str):
                return f"vector {name}: {found}"
            decoded[name] = found
        if (problem := unfit_vectors(decoded, self._own_sizes)) is not None:
            return problem
        for name, vector in decoded.items():
            if not finite(vector):
                return f"vector {name} is not finite, or its norm is above 1.8e19"
        return {name: decoded[name] for name in self._own_sizes}

    def _too_stale(self, dispatch: Dispatched) -> str | None:
        bound, staleness = self._settings.bounds.staleness, self._server.version - dispatch.version
        if bound is None or staleness <= bound:
            return None
        return f"staleness {staleness}, expected at most {bound}"

    def _too_long(self, message: UpdateMessage) -> str | None:
        """None within the bound, or if the update is clipped instead."""
        bounds = self._settings.bounds
        if bounds.over_norm != "drop" or (length := self.over_norm(message)) is None:
            return None
        return f"norm {length:g}, expected at most {bounds.norm:g}"

    def over_norm(self, message: UpdateMessage) -> float | None:
        """ℓ2 norm if it is above the bound, else None. For an update of kind `model` it is that of the
        difference to the global model."""
        bound = self._settings.bounds.norm
        if bound is None:
            return None
        is_model = message.kind == "model"
        length = norm(message.vector - self._server.w if is_model else message.vector)
        return None if length <= bound else length

    def clip(self, message: UpdateMessage, length: float) -> Vector:
        """Scale the update to the bound, and return its vector, shape (d,). `length`: from `over_norm`.
        For an update of kind `model`, the difference to the global model is scaled."""
        share, w = (self._settings.bounds.norm or 0.0) / length, self._server.w
        vector = message.vector.astype(w.dtype)
        if message.kind != "model":
            vector *= share
            return vector
        vector -= w
        vector *= share
        vector += w
        return vector


def within_clock_error(
    message: UpdateMessage, begin: Nanoseconds, end: Nanoseconds, error: Nanoseconds
) -> UpdateMessage:
    """Times before `begin` or after `end` by at most `error` are moved to them. All are on the client's
    clock."""

    def moved(at: Nanoseconds) -> Nanoseconds:
        nearest = min(max(at, begin), end)
        return nearest if abs(at - nearest) <= error else at

    return replace(
        message,
        downloaded=moved(message.downloaded),
        train_start=moved(message.train_start),
        train_end=moved(message.train_end),
        sent=moved(message.sent),
    )


def _impossible_field(message: UpdateMessage, begin: Nanoseconds, end: Nanoseconds) -> str | None:
    """Rules divide by the fields or use them as weights, and the verdict on the run uses the times.
    `begin`, `end`: the client's clock."""
    if max(message.sequence, message.samples, message.steps) > MAX_COUNT:
        return f"sequence, samples or steps are above {MAX_COUNT}"
    trained = begin <= message.downloaded <= message.train_start <= message.train_end <= end
    if not (
        trained and begin <= message.sent <= end
    ):  # `sent` may be before `train_end`, if an early pull was handled
        return "times are not in order, or not between dispatch and arrival"
    if message.samples < 1:
        return f"{message.samples} samples, expected at least 1"
    if message.steps < 0:  # 0 if a client was interrupted before its first step
        return f"{message.steps} steps, expected at least 0"
    if not 0 < message.effective_steps <= _MAX_EFFECTIVE_STEPS:
        return f"{message.effective_steps:g} effective steps, expected above 0 and at most 1e12"
    if _MAX_LOSS < abs(message.loss) < math.inf:
        return f"loss {message.loss:g} is outside of the range of float32"
    return None


_NO_FACTS: dict[str, Any] = {}
_STRAYS = 100, 10.0
"""Rate limit for records about a client's messages that answer no dispatch: maximum number of records at
once, and maximum number per second of device time."""
_MAX_REASON = 200
"""Characters, which may come from a device."""


@dataclass(slots=True)  # not frozen: a frozen object takes 1 µs longer to make, once per update
class Verdict:
    """Carry out `first`, pass `update` to the rule, then carry out `last`."""

    first: list[Action]
    update: Update | None = None
    """None if the arriving update is rejected or is a duplicate."""
    last: tuple[Action, ...] = ()
    is_work_lost: bool = False
    """The update answers a dispatch, and is rejected."""


class Intake:
    def __init__(
        self,
        settings: Settings,
        server: Server,
        sending: Sending,
        progress: RunProgress,
        ending: Ending,
        steps: ServerSteps,
    ) -> None:
        self._settings = settings
        self._server = server
        self._sending = sending
        self._dispatches, self._outgoing = sending.dispatches, sending.outgoing
        self._progress = progress
        self._ending = ending
        self._sums = steps.sums
        self._validation = Validation(settings, server, steps)
        self._bounds_norm = settings.bounds.norm is not None
        self._own_sizes = sizes(settings.side.update_vectors, server.w.size)
        self._strays = RateLimit(*_STRAYS)

    def judge(self, event: UpdateArrived, epoch: Nanoseconds, *, clock_runs: bool) -> Verdict:
        """`epoch`: the client's clock at device time 0."""
        at, sender, message, number = event.at, event.sender, event.message, event.message.dispatch
        is_ours = (message.run, message.client) == (self._settings.run, sender)
        is_valid = is_ours and message.sequence > 0
        is_taken = sender in self._server.clients and self._ending.end is None
        dispatch = self._dispatches.answer(sender, number, is_valid=is_valid, is_taken=is_taken)
        if not isinstance(dispatch, Dispatched):
            return self._unasked(event, dispatch, is_ours=is_ours)
        last = (Acknowledgement(sender, number),)
        # While the run clock stands still, the times of a running client are ahead of it.
        end = epoch + event.arrived if clock_runs else MAX_COUNT
        base, begin = self._sending.bases.get(dispatch.version), epoch + dispatch.at
        if error := self._settings.clock_errors.get(sender):
            timed = within_clock_error(message, begin, end, error)
            event = replace(event, message=timed)
        usable = self._validation.check(event, dispatch, base, begin, end)
        stall = self._progress.note_arrival(sender, event.arrived - dispatch.at, at)
        if isinstance(usable, str):
            if usable == DIVERGED:
                self._progress.note_diverged(sender)
            record = unfinished(sender, dispatch, number, at, event.arrived)
            rejected = [*stall, *self.reject(sender, usable, at, number), record]
            return Verdict(rejected, last=last, is_work_lost=True)
        self._progress.note_usable()
        vector, first = usable.vector, cast(list[Action], stall)
        if self._bounds_norm and (length := self._validation.over_norm(usable)) is not None:
            vector = self._validation.clip(usable, length)
            first.append(Log(events.UpdateClipped(to_seconds(at), sender, length)))
        self._outgoing.close_request(sender)
        facts = _NO_FACTS if self._sums is None else self._sums.record_fields(sender, number)
        self._sending.arrivals.add(event, dispatch, epoch, self._server.w.size, facts, self._own_sizes)
        update = Update(
            client=sender,
            dispatch=number,
            base_version=message.base_version,
            vector=vector,
            kind=cast(Kind, message.kind),
            samples=message.samples,
            steps=message.steps,
            effective_steps=message.effective_steps,
            round_trip=event.arrived - dispatch.at,
            dispatched=dispatch.at,
            vectors=cast(Vectors, usable.vectors),
            base=base,
        )
        return Verdict(first, update, last)

    def _unasked(self, event: UpdateArrived, answer: NoAnswer, *, is_ours: bool) -> Verdict:
        """An update that answers no open dispatch. `is_ours`: it states this run and the sender."""
        sender, message, number = event.sender, event.message, event.message.dispatch
        if answer is NoAnswer.DUPLICATE:
            return Verdict([Acknowledgement(sender, number)])
        known, is_update = 0 if answer is NoAnswer.NEVER_SENT else number, message.sequence > 0
        acknowledged = (Acknowledgement(sender, number),) if is_ours and is_update and known else ()
        if (end := self._ending.end) is not None:
            late = "arrived after the run had ended"
            record = events.UpdateRejected(to_seconds(end.at), sender, late, known)
            return Verdict([Log(record), *acknowledged])
        if is_update:
            self._outgoing.request_again(sender)
        if sender not in self._server.clients:
            why = "its client is not present"
        elif not is_ours:
            why = f"says it is from {message.client} in run {message.run}"
        elif not is_update:
            why = f"duplicate: sequence {message.sequence}"
        else:
            why = f"answers dispatch {number}, which is not open"
        return Verdict([*self.stray(sender, why, event.at, known), *acknowledged])

    # Rejections

    def reject(self, sender: str, reason: str, at: Nanoseconds, dispatch: int = 0) -> list[Action]:
        """Return no record after the end of the run. `dispatch`: that the message answers; 0 if
        unknown."""
        if self._ending.end is not None:
            return []
        why = make_printable(reason, _MAX_REASON)
        return [Log(events.UpdateRejected(to_seconds(at), sender, why, dispatch))]

    def stray(self, sender: str, reason: str, at: Nanoseconds, dispatch: int = 0) -> list[Action]:
        """Return a record only if the rate limit permits: a client can send any number of messages that
        answer no dispatch."""
        admitted = self._strays.admits(sender, to_seconds(at))
        return self.reject(sender, reason, at, dispatch) if admitted else []

    def unrecorded_notes(self, at: Nanoseconds) -> list[Log]:
        """A note per client with the number of messages that were rejected without a record."""
        return [
            Log(events.Note(to_seconds(at), f"{count} more messages of {client} were rejected"))
            for client, count in self._strays.refused.items()
        ]
