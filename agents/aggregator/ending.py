"""End of a run, and the wait for its last evaluations. No I/O and no clock."""

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
"""Host seconds after which the run notes that it waits for a last evaluation. An interrupted run waits
at most this long, because its process will soon be killed."""
_CUT_SHORT = ("interrupted", "no clients left")


@dataclass(frozen=True, slots=True)
class End:
    at: Nanoseconds
    reason: str
    """Reason for the end, as in `events.RunEnded`."""

    @property
    def is_cut_short(self) -> bool:
        """The run can be resumed."""
        return self.reason in _CUT_SHORT


class Ending:
    def __init__(self, settings: Settings, timers: Timers, evaluations: Evaluations) -> None:
        self._last = settings.last_evaluation
        self._timers = timers
        self._evaluations = evaluations
        self.end: End | None = None

    @property
    def is_cut_short(self) -> bool:
        """The run has ended and can be resumed."""
        return self.end is not None and self.end.is_cut_short

    @property
    def is_waited_for(self) -> bool:
        """The run has ended and waits for its last evaluations; False if these take no time."""
        return self._last is not None and self.end is not None

    def begin(self, reason: str, at: Nanoseconds, now: Nanoseconds, timeout: float) -> None:
        """Wait for the last evaluations, from `now` on, as the settings say, but at most `timeout` host
        seconds."""
        self.end = End(at, reason)
        self._timers.set_aside()
        if self._last is None:
            return
        timeout = min(timeout, math.inf if self._last.timeout is None else self._last.timeout)
        if timeout > GRACE_S:
            self._timers.set("waiting", now + from_seconds(GRACE_S / self._last.dilation))
        if timeout < math.inf:
            self._timers.set("give up", now + from_seconds(timeout / self._last.dilation))

    def undo(self) -> None:
        """Resume a run that had ended early, with the timers that were set when it ended."""
        self.end = None
        self._timers.bring_back()

    def note_waiting(self, end: End, version: int) -> Log:
        """With the time of the run's end, because the run clock stands still."""
        count = self._evaluations.remaining(version)
        what = "evaluation" if count == 1 else f"{count} evaluations"
        text = f"the run is over and waits for its last {what}"
        if self._last is not None and self._last.timeout is not None:
            text += f", at most {self._last.timeout:g} s (without limit: evaluate: {{when: after}})"
        return Log(events.Note(to_seconds(end.at), text))

    def note_giving_up(self, end: End, version: int, why: str) -> Log:
        count = self._evaluations.remaining(version)
        what = "the last model was" if count == 1 else f"the last {count} models were"
        return Log(events.Note(to_seconds(end.at), f"{what} not evaluated: {why}"))
