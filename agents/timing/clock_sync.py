"""Estimate of another node's clock from questions and answers, as NTP does.

In each exchange, the other clock is read between the sending of the question and the arrival of the
answer. The best estimate is the middle of these two times, with an error of at most half of the round
trip. So the exchanges with the shortest round trips are the most accurate. Clocks drift, by assumption
constantly over the window, so a line is fitted through the best exchange of each second, weighted by
accuracy.

This module needs only Python 3.9, because it is sent to nodes and real devices as it is. All times are
whole nanoseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LARGEST_ERROR = 0.1
"""Seconds by which times converted with an estimate may be wrong. On a busy host an estimate can be
wrong by more than a message takes."""
_SLOT = 10**9
"""Length of a slot, of which only the exchange with the shortest round trip is used."""
_SLOTS = 120
"""Maximum number of slots that are kept; the oldest is dropped first."""
_MAX_DRIFT = 200e-6
"""Between two quartz clocks, in seconds per second: assumed until the actual drift is known."""
_MIN_SPAN = 5 * 10**9
"""Minimum time between first and last exchange to estimate the drift. Over shorter times, the
uncertainty of the round trips is larger."""


@dataclass(frozen=True)
class Estimate:
    """When this node's clock shows `own`, the other shows own + offset + drift × (own − at)."""

    at: int
    """Reference time on this node's clock."""
    offset: int
    """Other clock minus this node's at `at`."""
    drift: float
    """Seconds per second, against this node's clock."""
    uncertainty: int
    """Maximum error of a converted time."""

    def other(self, own: int) -> int:
        """Other clock when this node's shows `own`."""
        return own + self.offset + round(self.drift * (own - self.at))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Estimate:
        return cls(**values)


@dataclass(frozen=True)
class _ClockReading:
    at: int
    """Middle between question and answer, on this node's clock."""
    offset: int
    """Other clock minus `at`."""
    half: int
    """Half of the round trip: the maximum error of `offset`."""


@dataclass
class Exchanges:
    """The exchanges with another node; only the best exchange of each slot is kept."""

    _best: deque[_ClockReading] = field(default_factory=lambda: deque(maxlen=_SLOTS))

    def add(self, asked: int, other: int, answered: int) -> None:
        """Question at `asked`, answer at `answered` on this node's clock; in between, the other showed
        `other`."""
        middle = (asked + answered) // 2
        new = _ClockReading(middle, other - middle, (answered - asked + 1) // 2)
        if not self._best or new.at // _SLOT != self._best[-1].at // _SLOT:
            self._best.append(new)
        elif new.half < self._best[-1].half:
            self._best[-1] = new

    def estimate(self) -> Estimate | None:
        """None before the first exchange."""
        if not self._best:
            return None
        best = list(self._best)
        latest = best[-1].at
        if latest - best[0].at < _MIN_SPAN:
            bounds = [one.half + round(_MAX_DRIFT * (latest - one.at)) for one in best]
            least = min(bounds)
            return Estimate(latest, best[bounds.index(least)].offset, 0.0, least)
        surest = min(best, key=lambda one: one.half)
        weights = [1 / (one.half + 1) ** 2 for one in best]
        total = sum(weights)
        # Times relative to one reading, because squares of absolute times would lose their last digits.
        at = [one.at - surest.at for one in best]
        offset = [one.offset - surest.offset for one in best]
        mean_at = sum(w * x for w, x in zip(weights, at, strict=True)) / total
        mean_offset = sum(w * y for w, y in zip(weights, offset, strict=True)) / total
        spread = sum(w * (x - mean_at) ** 2 for w, x in zip(weights, at, strict=True))
        common = sum(
            w * (x - mean_at) * (y - mean_offset) for w, x, y in zip(weights, at, offset, strict=True)
        )
        drift = common / spread
        begin = round(surest.at + mean_at)
        found = Estimate(begin, round(surest.offset + mean_offset), drift, 0)
        # If the line misses the interval of an exchange, its error is larger by that distance.
        astray = max(abs(one.at + one.offset - found.other(one.at)) - one.half for one in best)
        return Estimate(found.at, found.offset, drift, surest.half + max(0, astray))
