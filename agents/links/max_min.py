"""Max-min fair rates over shared limits: to raise one rate, another rate that is equal or lower would
have to be lowered. So each sender is slowed down by its own cap, or by a full limit on its path at which
no other sender is faster.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from agents.config import Segment, Way, path_of

_RISING = -1.0
"""Rate of a claim whose rate is not known yet."""
Sender = TypeVar("Sender", bound=Hashable)


class SharedLimit:
    """A limit on the sum of rates, such as one direction of a shared link."""

    __slots__ = ("free", "left", "waiting")

    def __init__(self, free: float = math.inf) -> None:
        self.free = free
        """Maximum sum of the senders' rates, in bit/s; infinite if there is no limit."""
        self.left, self.waiting = 0.0, 0
        """While rates are computed: rate that is not given away yet, and senders without a rate.
        Afterwards, `left` is what no sender uses."""


Limit = TypeVar("Limit", bound=SharedLimit)


class RateClaim(Generic[Limit]):
    """Equal claims of some senders on the limits of a path."""

    __slots__ = ("cap", "count", "path", "rate")

    def __init__(self, path: tuple[Limit, ...], cap: float = math.inf, count: int = 1) -> None:
        self.path, self.cap, self.count = path, cap, count
        self.rate = 0.0
        """Rate of each sender in bit/s."""


def share_out(claims: Sequence[RateClaim[Limit]], limits: Iterable[Limit]) -> None:
    """Set the max-min fair rate of each of `claims`, which are in the order of their caps.

    The common level of all rates rises from 0. A claim stops rising at its own cap, or when a limit on
    its path is full.
    """
    for limit in limits:
        limit.left, limit.waiting = limit.free, 0
    if claims and len(claims[0].path) == 1 and all(one.path is claims[0].path for one in claims):
        _share_limit(claims, claims[0].path[0])
        return
    for one in claims:
        one.rate = _RISING
        for limit in one.path:
            limit.waiting += one.count
    first, last = 0, len(claims)
    while first < last:
        if claims[first].rate != _RISING:
            first += 1
            continue
        level, full = math.inf, None
        for limit in limits:
            if limit.waiting and (most := limit.left / limit.waiting) < level:
                level, full = most, limit
        if claims[first].cap <= level:
            _stop(claims[first], claims[first].cap)
        else:
            for one in claims[first:]:
                if one.rate == _RISING and (full is None or full in one.path):
                    _stop(one, level)


def _share_limit(claims: Sequence[RateClaim[Limit]], limit: Limit) -> None:
    """Do the work of `share_out` for claims that share one limit only."""
    left, waiting = limit.left, sum(one.count for one in claims)
    level = math.inf
    for one in claims:
        if level == math.inf and one.cap * waiting <= left:
            one.rate = one.cap
            left -= one.cap * one.count
            waiting -= one.count
        else:  # all further claims have the same rate, as their caps are higher
            if level == math.inf:
                level = left / waiting
                left = 0.0 if level < math.inf else left
            one.rate = level
    limit.left = max(0.0, left)


def _stop(one: RateClaim[Limit], rate: float) -> None:
    """Give each sender of `one` the rate `rate`."""
    one.rate = rate
    for limit in one.path:
        limit.waiting -= one.count
        limit.left = max(0.0, limit.left - rate * one.count) if rate < math.inf else limit.left


def rates_on(
    senders: Mapping[Sender, str], segments: Mapping[str, Segment], way: Way
) -> dict[Sender, float]:
    """Return the rate of each of `senders` in bit/s if nobody else sends in the direction `way`. Senders
    that no segment limits are left out. `senders`: name of the segment that each is attached to.
    `segments`: the tree, by name."""
    limits = {
        name: SharedLimit(math.inf if (rate := segment.rate(way)) is None else float(rate))
        for name, segment in segments.items()
    }
    claims = {
        sender: RateClaim(tuple(limits[one.name] for one in path_of(name, segments)))
        for sender, name in senders.items()
    }
    share_out([*claims.values()], limits.values())
    return {sender: claim.rate for sender, claim in claims.items() if claim.rate < math.inf}
