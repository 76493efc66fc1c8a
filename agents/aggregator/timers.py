"""Timers of the aggregator's core, in device time. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from agents.timing.nanoseconds import Nanoseconds, next_multiple

Timer = (
    Literal["evaluate", "checkpoint", "after", "waiting", "give up"]
    | tuple[Literal["rule"], str]  # with the name that the rule has given it
    | tuple[Literal["report"], str]  # with the client that is to report
    | tuple[Literal["shares"], int]  # with the number of the sum that they are to open
)
"""What a timer is for."""
_ORDER: dict[Timer, int] = {"evaluate": 1, "checkpoint": 2, "after": 3}
"""Of timers that are due at once: the rule's work still counts, the end of the run comes last."""


@dataclass(frozen=True, slots=True)
class _Due:
    at: Nanoseconds
    period: Nanoseconds | None = None
    """It is due again so much later."""


class Timers:
    """Each is set once at a time: to set it again replaces it."""

    def __init__(self) -> None:
        self._due: dict[Timer, _Due] = {}
        self._aside: dict[Timer, _Due] = {}
        """What was set when the run ended, for one that continues."""

    @property
    def next(self) -> Nanoseconds | None:
        """When the first one is due."""
        return min((due.at for due in self._due.values()), default=None)

    @property
    def any_of_rule(self) -> bool:
        """Whether the rule has set one."""
        return any(timer[0] == "rule" for timer in self._due)

    def names(self) -> Set[Timer]:
        """Those that are set."""
        return self._due.keys()

    def set(self, timer: Timer, at: Nanoseconds) -> None:
        self._due[timer] = _Due(at)

    def set_periodic(self, timer: Timer, period: Nanoseconds, now: Nanoseconds) -> None:
        """Due at every multiple of `period` after `now`."""
        self._due[timer] = _Due(next_multiple(period, now), period)

    def cancel(self, timer: Timer) -> None:
        """It may not be set."""
        self._due.pop(timer, None)

    def clear(self) -> None:
        self._due = {}

    def set_aside(self) -> None:
        """Set none; `bring_back` undoes it."""
        self._aside, self._due = self._due, {}

    def bring_back(self) -> None:
        """Set those again that were set aside, and no others."""
        self._due, self._aside = self._aside, {}

    def pop(self, now: Nanoseconds) -> tuple[Timer, Nanoseconds] | None:
        """The first one that is due by `now`, and when it was due; a periodic one is set again."""
        first = self.next
        if first is None or first > now:
            return None
        together = [timer for timer, due in self._due.items() if due.at == first]
        timer = min(together, key=lambda one: _ORDER.get(one, 0))
        period = self._due.pop(timer).period
        if period is not None and timer[0] == "rule":  # no tick of it is left out, however late
            self._due[timer] = _Due(first + period, period)
        elif period is not None:
            self.set_periodic(timer, period, now)
        return timer, first
