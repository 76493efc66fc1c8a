"""Clock synchronisation: this node's clock against another's, by questions and answers, as in NTP.

Each exchange brackets the other clock: it was read between the sending of the question and the arrival
of the answer. The middle is the best guess, half of the round trip the most by which it is wrong, and
the shortest round trips are the best evidence. Clocks drift, evenly as far as we look: a line is fitted
through the best exchange of each second, weighted by how sure each one is.

It needs nothing but Python, as it is handed to nodes as it is. All is whole nanoseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_SLOT = 10**9
"""Of the exchanges in so much time the one with the shortest round trip counts."""
_SLOTS = 120
"""So many of them, the latest."""
_MOST_DRIFT = 200e-6
"""Of quartz clocks, against each other, as long as theirs is not known."""
_LONG_ENOUGH = 5 * 10**9
"""For a drift to be seen: over less, what the round trips leave open is more than what drifts."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The other clock shows own + offset + drift × (own − at)."""

    at: int
    """On the own clock."""
    offset: int
    drift: float
    """Seconds per second."""
    uncertainty: int
    """By which the converted time may be wrong."""

    def other(self, own: int) -> int:
        """What the other clock shows when this one shows `own`."""
        return own + self.offset + round(self.drift * (own - self.at))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Estimate:
        return cls(**values)


@dataclass(frozen=True, slots=True)
class _ClockReading:
    at: int
    """The middle, on the own clock."""
    offset: int
    half: int
    """Of the round trip."""


@dataclass(slots=True)
class Exchanges:
    """What was asked and answered; of each second the best."""

    _best: deque[_ClockReading] = field(default_factory=lambda: deque(maxlen=_SLOTS))

    def add(self, asked: int, told: int, answered: int) -> None:
        """The question left at `asked` and the answer came at `answered`, on the own clock; `told` is
        what the other clock showed in between."""
        middle = (asked + answered) // 2
        new = _ClockReading(middle, told - middle, (answered - asked + 1) // 2)
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
        if latest - best[0].at < _LONG_ENOUGH:
            bounds = [one.half + round(_MOST_DRIFT * (latest - one.at)) for one in best]
            least = min(bounds)
            return Estimate(latest, best[bounds.index(least)].offset, 0.0, least)
        surest = min(best, key=lambda one: one.half)
        weights = [1 / (one.half + 1) ** 2 for one in best]
        total = sum(weights)
        # Sums of differences to one of them: whole readings squared would lose their last digits.
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
        # An exchange that the line does not pass through contradicts it by as much as that.
        astray = max(abs(one.at + one.offset - found.other(one.at)) - one.half for one in best)
        return Estimate(found.at, found.offset, drift, surest.half + max(0, astray))
