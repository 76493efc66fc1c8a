"""Sorts arriving updates: duplicates, strays, late or unusable ones, and those for the rule. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from agents import events
from agents.aggregator.actions import Acknowledge, Action, Answered, Log
from agents.aggregator.dispatches import Dispatched, NoAnswer
from agents.aggregator.ending import Ending
from agents.aggregator.inputs import UpdateArrived
from agents.aggregator.progress import Progress
from agents.aggregator.sending import Sending, unfinished
from agents.aggregator.settings import Settings
from agents.aggregator.validation import MAX_COUNT, Validation
from agents.models.vectors import Vector
from agents.mqtt.rate_limit import RateLimit
from agents.pipeline import ServerSteps
from agents.rules.interface import Kind, Server, Update
from agents.texts import make_printable
from agents.timing.nanoseconds import Nanoseconds, to_seconds

_NO_FACTS: dict[str, Any] = {}
_STRAYS = 100, 10.0
"""Records of messages of one client that answer no dispatch: at once, and per second."""
_MAX_REASON = 200
"""Characters of a reason of a rejection, which may quote a device."""


@dataclass(slots=True)  # frozen, each would take the aggregator 1 µs more
class Verdict:
    """What to do about an update: carry out `first`, give the rule `update`, then carry out `last`."""

    first: list[Action]
    update: Update | None = None
    """None if the rule cannot be given it."""
    last: tuple[Action, ...] = ()
    is_model_due: bool = False
    """The update cannot be used, and its client has no other model to work on."""


class Intake:
    def __init__(
        self,
        settings: Settings,
        server: Server,
        sending: Sending,
        progress: Progress,
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
        self._strays = RateLimit(*_STRAYS)

    def unfit(self, vector: Vector) -> str | None:
        """Why `vector` cannot go into this run's model, or None."""
        return self._validation.unfit(vector)

    def judge(self, event: UpdateArrived, epoch: Nanoseconds, *, clock_runs: bool) -> Verdict:
        """Decide about an update. `epoch` is what its client's clock showed at time 0."""
        at, sender, message = event.at, event.sender, event.message
        number, end = message.dispatch, self._ending.end
        is_ours = (message.run, message.client) == (self._settings.run, sender)
        is_present, is_update = sender in self._server.clients, message.sequence > 0
        answer = self._dispatches.answer(
            sender, number, is_valid=is_update and is_ours, is_taken=is_present and end is None
        )
        if answer is NoAnswer.DUPLICATE:
            return Verdict([Acknowledge(sender, number)])
        known = 0 if answer is NoAnswer.NEVER_SENT else number
        acknowledged = (Acknowledge(sender, number),) if is_update and is_ours and known else ()
        if end is not None:
            late = "arrived after the run had ended"
            record = events.UpdateRejected(to_seconds(end.at), sender, late, known)
            return Verdict([Log(record), *acknowledged])
        if isinstance(answer, Dispatched):
            last = (Answered(sender), *acknowledged)
            return self._use(event, answer, epoch, last, clock_runs=clock_runs)
        if is_update:
            self._outgoing.request_again(sender)
        if not is_present:
            why = "from a client that is not present"
        elif not is_ours:
            why = f"says it is from {message.client} in run {message.run}"
        elif not is_update:
            why = f"duplicate: sequence {message.sequence}"
        else:
            why = f"answers dispatch {number}, which is not open"
        return Verdict([*self.stray(sender, why, at, known), *acknowledged])

    def _use(
        self,
        event: UpdateArrived,
        dispatch: Dispatched,
        epoch: Nanoseconds,
        last: tuple[Action, ...],
        *,
        clock_runs: bool,
    ) -> Verdict:
        """Prepare the answer to `dispatch` for the rule, if it can be used."""
        at, sender, number = event.at, event.sender, event.message.dispatch
        # While the clock stands still a client that outlived it is ahead of it.
        end = epoch + event.arrived if clock_runs else MAX_COUNT
        base, begin = self._sending.bases.get(dispatch.version), epoch + dispatch.at
        message = self._validation.usable(event, dispatch, base, begin, end)
        stall = self._progress.arrived(sender, event.arrived - dispatch.at, at)
        if isinstance(message, str):
            record = unfinished(sender, dispatch, number, at, event.arrived)
            rejected = [*stall, *self.reject(sender, message, at, number), record]
            if not self._dispatches.has_open(sender):
                return Verdict(rejected, last=last, is_model_due=True)
            self._outgoing.request_again(sender)
            return Verdict(rejected, last=last)
        vector, first = message.vector, cast(list[Action], stall)
        if self._bounds_norm and (length := self._validation.over_norm(message)) is not None:
            vector = self._validation.clipped(message, length)
            first.append(Log(events.UpdateClipped(to_seconds(at), sender, length)))
        self._outgoing.satisfied(sender)
        facts = _NO_FACTS if self._sums is None else self._sums.record_fields(sender, number)
        self._sending.arrivals.add(event, dispatch, epoch, self._server.w.size, facts)
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
        )
        return Verdict(first, update, last)

    # Rejections

    def reject(self, sender: str, reason: str, at: Nanoseconds, dispatch: int = 0) -> list[Action]:
        """Record that what `sender` sent cannot be used. `dispatch` is the one that it answers, 0 if
        that is unknown."""
        if self._ending.end is not None:
            return []
        why = make_printable(reason, _MAX_REASON)
        return [Log(events.UpdateRejected(to_seconds(at), sender, why, dispatch))]

    def stray(self, sender: str, reason: str, at: Nanoseconds, dispatch: int = 0) -> list[Action]:
        """Reject what answers no dispatch. There can be any number of them, unlike of updates, for each
        of which there was a model."""
        admitted = self._strays.admits(sender, to_seconds(at))
        return self.reject(sender, reason, at, dispatch) if admitted else []

    def not_recorded(self, at: Nanoseconds) -> list[Log]:
        """Notes of how many strays have no record of their own."""
        return [
            Log(events.Note(to_seconds(at), f"{count} more messages of {client} were rejected"))
            for client, count in self._strays.refused.items()
        ]
