"""Max-min fair rates over shared limits, and which senders have to fill which segment to measure it."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

from agents.config import Segment, Way, path_of
from agents.wire.messages import SegmentFigures

# Max-min fair rates over shared limits: to raise one rate, another rate that is equal or lower would
# have to be lowered. So each sender is slowed down by its own cap, or by a full limit on its path at
# which no other sender is faster.
#
# All senders with the same path form a branch. Those that their caps do not slow down have the same
# rate, the branch's level. Levels are computed from the sums of the caps below a level, which a branch
# keeps in the order of its caps. So the cost grows with the number of branches, and hardly with that of
# caps.

Sender = TypeVar("Sender", bound=Hashable)


class SharedLimit:
    """Limit on a sum of rates, such as one direction of a shared link."""

    __slots__ = ("branches", "first", "free", "is_stale", "level", "rising")

    def __init__(self, free: float = math.inf) -> None:
        self.free = free
        """bit/s for all senders together; infinite if not limited."""
        self.branches: list[Branch[Any, Any]] = []
        """Branches when levels were last computed; none if the limit is infinite."""
        self.rising: list[Branch[Any, Any]] = []
        """While levels are computed: branches whose level is not final."""
        self.level = 0.0
        """While levels are computed: level at which the limit is full; infinite if it never is."""
        self.first = 0.0
        """`level` without regard to other limits."""
        self.is_stale = True
        """`free`, or a branch, has changed since `first` was computed."""

    @property
    def unused(self) -> float:
        """bit/s that no sender uses."""
        return max(0.0, self.free - sum(one.total() for one in self.branches))


Limit = TypeVar("Limit", bound=SharedLimit)


class RateClaim:
    __slots__ = ("cap", "count")

    def __init__(self, cap: float = math.inf, count: int = 1) -> None:
        self.cap, self.count = cap, count


Claim = TypeVar("Claim", bound=RateClaim)


class Branch(Generic[Limit, Claim]):
    __slots__ = ("caps", "claims", "is_final", "level", "numbers", "path", "sums")

    def __init__(self, path: tuple[Limit, ...]) -> None:
        self.path = path
        self.caps: list[float] = []
        """Caps of `claims`, which are in this order."""
        self.claims: list[Claim] = []
        self.level = 0.0
        """bit/s of the senders that their caps do not slow down."""
        self.is_final = False
        """While levels are computed."""
        self.sums: list[float] = [0.0]
        """bit/s of the caps of the senders in the first k claims, for each k."""
        self.numbers: list[int] = [0]
        """Senders in the first k claims, for each k."""

    def add(self, claim: Claim) -> int:
        """Return the place among the claims."""
        place = bisect_right(self.caps, claim.cap)
        self.caps.insert(place, claim.cap)
        self.claims.insert(place, claim)
        return place

    def remove(self, claim: Claim) -> int:
        """Return the former place among the claims."""
        place = self.claims.index(claim, bisect_left(self.caps, claim.cap))
        del self.caps[place], self.claims[place]
        return place

    def count(self) -> None:
        """Has to be called after claims have changed."""
        self.sums = [0.0, *accumulate([one.cap * one.count for one in self.claims])]
        self.numbers = [0, *accumulate([one.count for one in self.claims])]

    def total(self) -> float:
        """bit/s of all senders at the branch's level."""
        place = bisect_right(self.caps, self.level)
        rising = self.numbers[-1] - self.numbers[place]
        return self.sums[place] + (self.level * rising if rising else 0.0)


def share_out(branches: Collection[Branch[Any, Any]], limits: Iterable[SharedLimit]) -> None:
    """Set the level of each branch, which has senders. `limits`: all limits of their paths.

    A limit is full at the level at which its senders use all of it, if no other limit slows them down
    before. Where no sender meets a lower level at another limit of its path, the level is final.
    """
    for limit in limits:
        limit.branches = []
    shared: list[SharedLimit] = []
    for one in branches:
        one.level, one.is_final = math.inf, False
        for limit in one.path:
            if limit.free < math.inf:
                if not limit.branches:
                    shared.append(limit)
                limit.branches.append(one)
    for limit in shared:
        if limit.is_stale:
            limit.first, limit.is_stale = _full_level(limit.branches, limit.free, limit.first), False
        limit.rising, limit.level = limit.branches, limit.first
    lowest = min(shared, key=lambda limit: limit.level, default=None)
    if lowest is not None and len(lowest.branches) == len(branches):
        for one in branches:
            one.level = lowest.level
        return
    while shared:
        for limit in shared:
            for one in limit.rising:
                if limit.level < one.level:
                    one.level = limit.level
        for limit in shared:
            for one in limit.rising:
                if one.level < limit.level:
                    break
            else:
                for one in limit.rising:
                    one.is_final = True
        shared = [limit for limit in shared if not _is_final(limit)]


def _is_final(limit: SharedLimit) -> bool:
    """The levels of all branches are final. If not, compute the level at which the others fill the
    limit."""
    still = [one for one in limit.rising if not one.is_final]
    if still and len(still) < len(limit.rising):
        used = sum(one.total() for one in limit.branches if one.is_final)
        limit.level = _full_level(still, max(0.0, limit.free - used), limit.level)
        limit.rising = still
    for one in still:
        one.level = math.inf
    return not still


def _full_level(branches: Sequence[Branch[Any, Any]], free: float, level: float) -> float:
    """Level at which the senders use all of `free`; infinite if they never do. `level`: where the search
    begins, such as the last one."""
    is_below = False
    while True:
        capped, rising = 0.0, 0
        for one in branches:
            place = bisect_right(one.caps, level)
            capped += one.sums[place]
            rising += one.numbers[-1] - one.numbers[place]
        if not rising:
            if is_below or capped <= free:
                return math.inf
            level = 0.0
            continue
        last, level = level, (free - capped) / rising
        if level == last or (is_below and level < last):
            return level
        is_below = True  # from there on it rises: senders with lower caps leave more to the others


def rates_on(
    senders: Mapping[Sender, str], segments: Mapping[str, Segment], way: Way
) -> dict[Sender, float]:
    """bit/s of each sender if nobody else sends, if a segment limits it. `senders`: name of the segment
    that each is attached to. `segments`: the tree."""
    limits = {
        name: SharedLimit(math.inf if (rate := segment.rate(way)) is None else float(rate))
        for name, segment in segments.items()
    }
    branches: dict[str, Branch[SharedLimit, RateClaim]] = {}
    for name in senders.values():
        if name not in branches:
            branches[name] = Branch(tuple(limits[one.name] for one in path_of(name, segments)))
        branches[name].add(RateClaim())
    for one in branches.values():
        one.count()
    share_out(branches.values(), limits.values())
    rates = {sender: branches[name].level for sender, name in senders.items()}
    return {sender: rate for sender, rate in rates.items() if rate < math.inf}


_TRIES = 3
"""Maximum number of measurements of a segment."""
_MAX_SECONDS, _MAX_TOTAL_SECONDS = 0.5, 8.0
"""Maximum duration of a measurement, and of all measurements of one direction together."""
_NEAR = 0.02
"""A measurement within this relative distance of the expected rate is the last."""


@dataclass(frozen=True, slots=True)
class SegmentProbe(Generic[Sender]):
    """One direction of a segment. Rates are expected ones, in bit/s."""

    segment: str
    way: Way
    alone: Mapping[Sender, float]
    """The fastest single sender."""
    together: Mapping[Sender, float]
    """All senders below the segment."""
    seconds: float

    @property
    def loads(self) -> tuple[Mapping[Sender, float], ...]:
        """Senders of each measurement."""
        return (self.alone, self.together) if len(self.together) > 1 else (self.alone,)

    def figures(self, measured: Sequence[float]) -> SegmentFigures:
        """Expected figures, with those measured. `measured`: bit/s of each of `loads`."""
        full, reach = (round(sum(one.values())) for one in (self.together, self.alone))
        return SegmentFigures(self.segment, self.way, full, reach, measured[0], measured[-1])


def probes(
    senders: Mapping[Sender, str], segments: Mapping[str, Segment], way: Way
) -> Iterator[SegmentProbe[Sender]]:
    """Each segment with a rate in the direction `way` and senders below it. `senders`: name of the
    segment that each is attached to. `segments`: the tree."""
    paths = {sender: {one.name for one in path_of(name, segments)} for sender, name in senders.items()}
    found = []
    for name, segment in segments.items():
        below = {sender: senders[sender] for sender, path in paths.items() if name in path}
        if segment.rate(way) is not None and below:
            single = (rates_on({sender: at}, segments, way) for sender, at in below.items())
            alone = max(single, key=lambda one: sum(one.values()))
            found.append((name, alone, rates_on(below, segments, way)))
    seconds = min(_MAX_SECONDS, _MAX_TOTAL_SECONDS / max(1, 2 * len(found)))
    for name, alone, together in found:
        yield SegmentProbe(name, way, alone, together, seconds)


def is_enough(measured: Sequence[float], load: Mapping[Sender, float]) -> bool:
    """A rate is close to the expected one, or there are as many as allowed."""
    expected = sum(load.values())
    return len(measured) >= _TRIES or any(abs(rate / expected - 1) <= _NEAR for rate in measured)


def nearest(measured: Sequence[float], load: Mapping[Sender, float]) -> float:
    """Measured rate that is nearest to the expected one."""
    return min(measured, key=lambda one: abs(one - sum(load.values())))
