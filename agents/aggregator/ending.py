"""The end of a run, and how long it waits for its last evaluations. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agents import events
from agents.aggregator.actions import Log
from agents.aggregator.evaluations import Evaluations
from agents.aggregator.settings import Settings
from agents.aggregator.timers import Timers
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds

GRACE_S = 1.5
"""Seconds of the host that a last evaluation has before the run says that it waits for it, and that it
has at all if the run is interrupted: a process that is told to end is soon killed."""
_CUT_SHORT = ("interrupted", "no clients left")


@dataclass(frozen=True, slots=True)
class End:
    at: Nanoseconds
    reason: str
    """As in `events.RunEnded`."""

    @property
    def is_cut_short(self) -> bool:
        """Whether the run can be continued."""
        return self.reason in _CUT_SHORT


class Ending:
    def __init__(self, settings: Settings, timers: Timers, evaluations: Evaluations) -> None:
        self._last = settings.last_evaluation
        self._timers = timers
        self._evaluations = evaluations
        self.end: End | None = None

    @property
    def is_cut_short(self) -> bool:
        """Whether the run has ended, and can be continued."""
        return self.end is not None and self.end.is_cut_short

    @property
    def is_waited_for(self) -> bool:
        """Whether the end waits for evaluations that take time."""
        return self._last is not None and self.end is not None

    def begin(self, reason: str, at: Nanoseconds, timeout: float) -> None:
        """The run ends `at`. Its last evaluations have as long as the settings say, and at most
        `timeout` seconds of the host."""
        self.end = End(at, reason)
        self._timers.set_aside()
        if self._last is None:
            return
        timeout = min(timeout, math.inf if self._last.timeout is None else self._last.timeout)
        if timeout > GRACE_S:
            self._timers.set("waiting", at + from_seconds(GRACE_S / self._last.dilation))
        if timeout < math.inf:
            self._timers.set("give up", at + from_seconds(timeout / self._last.dilation))

    def undo(self) -> None:
        """A run that was cut short continues, with the timers that it had."""
        self.end = None
        self._timers.bring_back()

    def waits(self, end: End, version: int) -> Log:
        """The note that the run has waited for a while. The run clock stands still: the note is of the
        time of the end."""
        count = self._evaluations.left(version)
        what = "evaluation is" if count == 1 else f"{count} evaluations are"
        text = f"the run is over; its last {what} waited for"
        if self._last is not None and self._last.timeout is not None:
            text += f", at most {self._last.timeout:g} s (without limit: evaluate: {{when: after}})"
        return Log(events.Note(to_seconds(end.at), text))

    def gives_up(self, end: End, version: int, why: str) -> Log:
        """The note that the last evaluations are not waited for any longer."""
        count = self._evaluations.left(version)
        what = "the last model was" if count == 1 else f"the last {count} models were"
        return Log(events.Note(to_seconds(end.at), f"{what} not evaluated: {why}"))
