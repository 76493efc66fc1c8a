"""Decision about each arriving update: to the rule, or rejected. No I/O and no clock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from agents import events
from agents.aggregator.actions import Acknowledge, Action, Log
from agents.aggregator.dispatches import Dispatched, NoAnswer
from agents.aggregator.ending import Ending
from agents.aggregator.inputs import UpdateArrived
from agents.aggregator.progress import RunProgress
from agents.aggregator.sending import Sending, unfinished
from agents.aggregator.settings import Settings
from agents.aggregator.validation import MAX_COUNT, Validation, within_clock_error
from agents.models.vectors import DIVERGED
from agents.mqtt.rate_limit import RateLimit
from agents.pipeline import ServerSteps
from agents.rules.client_half import sizes
from agents.rules.interface import Kind, Server, Update, Vectors
from agents.texts import make_printable
from agents.timing.nanoseconds import Nanoseconds, to_seconds

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
        last = (Acknowledge(sender, number),)
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
            return Verdict([Acknowledge(sender, number)])
        known, is_update = 0 if answer is NoAnswer.NEVER_SENT else number, message.sequence > 0
        acknowledged = (Acknowledge(sender, number),) if is_ours and is_update and known else ()
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
