"""Timers of the aggregator's core, in device time. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from agents.timing.nanoseconds import Nanoseconds, next_multiple

Timer = (
    Literal["evaluate", "checkpoint", "after", "waiting", "give up", "redraw"]
    | tuple[Literal["rule"], str]  # with the rule's name for the timer
    | tuple[Literal["report"], str]  # with the client that owes the report
    | tuple[Literal["shares"], int]  # with the number of the sum
)
"""Named by its purpose."""
_ORDER: dict[Timer, int] = {"evaluate": 1, "checkpoint": 2, "after": 3}
"""Order of timers that are due at the same time. Others, such as the rule's, come first."""


@dataclass(frozen=True, slots=True)
class _DueTime:
    at: Nanoseconds
    period: Nanoseconds | None = None
    """None if the timer fires once."""


class Timers:
    """Setting a timer again replaces the earlier one."""

    def __init__(self) -> None:
        self._due: dict[Timer, _DueTime] = {}
        self._aside: dict[Timer, _DueTime] = {}
        """Timers at the end of the run, which are set again if it is resumed."""

    @property
    def next(self) -> Nanoseconds | None:
        """None if no timer is set."""
        return min((due.at for due in self._due.values()), default=None)

    @property
    def any_of_rule(self) -> bool:
        return any(timer[0] == "rule" for timer in self._due)

    def names(self) -> Set[Timer]:
        return self._due.keys()

    def due(self, timer: Timer) -> Nanoseconds | None:
        """Return the time at which `timer` is due; None if it is not set."""
        return None if timer not in self._due else self._due[timer].at

    def set(self, timer: Timer, at: Nanoseconds) -> None:
        self._due[timer] = _DueTime(at)

    def set_periodic(self, timer: Timer, period: Nanoseconds, now: Nanoseconds) -> None:
        """Due at the times k · `period` (k = 1, 2, ...) that are later than `now`."""
        self._due[timer] = _DueTime(next_multiple(period, now), period)

    def cancel(self, timer: Timer) -> None:
        """Do nothing if the timer is not set."""
        self._due.pop(timer, None)

    def clear(self) -> None:
        self._due = {}

    def set_aside(self) -> None:
        """Cancel all timers, but keep them for `bring_back`."""
        self._aside, self._due = self._due, {}

    def bring_back(self) -> None:
        """Set the timers that `set_aside` has kept, and cancel all others."""
        self._due, self._aside = self._aside, {}

    def pop(self, now: Nanoseconds) -> tuple[Timer, Nanoseconds] | None:
        """Return the earliest timer that is due, and when it was; None if there is none. A periodic
        timer is set again."""
        first = self.next
        if first is None or first > now:
            return None
        together = [timer for timer, due in self._due.items() if due.at == first]
        timer = min(together, key=lambda one: _ORDER.get(one, 0))
        period = self._due.pop(timer).period
        if period is not None and timer[0] == "rule":  # a late tick of a rule is not skipped
            self._due[timer] = _DueTime(first + period, period)
        elif period is not None:
            self.set_periodic(timer, period, now)
        return timer, first
