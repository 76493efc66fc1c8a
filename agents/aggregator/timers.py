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
"""Name of a timer. It states the timer's purpose."""
_ORDER: dict[Timer, int] = {"evaluate": 1, "checkpoint": 2, "after": 3}
"""Order of timers that are due at the same time. Timers without an entry, such as the rule's
timers, come first."""


@dataclass(frozen=True, slots=True)
class _DueTime:
    """Time at which a timer is due, and its period."""

    at: Nanoseconds
    period: Nanoseconds | None = None
    """Period in ns of a periodic timer; None if the timer fires once."""


class Timers:
    """Timers by name. Setting a timer again replaces the earlier one."""

    def __init__(self) -> None:
        self._due: dict[Timer, _DueTime] = {}
        self._aside: dict[Timer, _DueTime] = {}
        """Timers that were set when the run ended. These timers are set again if the run is resumed."""

    @property
    def next(self) -> Nanoseconds | None:
        """Time of the earliest timer; None if no timer is set."""
        return min((due.at for due in self._due.values()), default=None)

    @property
    def any_of_rule(self) -> bool:
        """Whether the rule has set a timer."""
        return any(timer[0] == "rule" for timer in self._due)

    def names(self) -> Set[Timer]:
        """Return the names of all timers that are set."""
        return self._due.keys()

    def set(self, timer: Timer, at: Nanoseconds) -> None:
        self._due[timer] = _DueTime(at)

    def set_periodic(self, timer: Timer, period: Nanoseconds, now: Nanoseconds) -> None:
        """Set a timer that is due at the times k · `period` (k = 1, 2, ...) that are later than
        `now`."""
        self._due[timer] = _DueTime(next_multiple(period, now), period)

    def cancel(self, timer: Timer) -> None:
        """Cancel a timer, if it is set."""
        self._due.pop(timer, None)

    def clear(self) -> None:
        self._due = {}

    def set_aside(self) -> None:
        """Cancel all timers, but keep them for `bring_back`."""
        self._aside, self._due = self._due, {}

    def bring_back(self) -> None:
        """Set the timers that `set_aside` has kept, and cancel all other timers."""
        self._due, self._aside = self._aside, {}

    def pop(self, now: Nanoseconds) -> tuple[Timer, Nanoseconds] | None:
        """Remove the earliest timer that is due at `now`. Return the timer's name and the time at which
        the timer was due. Return None if no timer is due. A periodic timer is set again."""
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
