"""Time in cores, rules and shells: whole nanoseconds (int), so that equal moments are equal.

Sums of floating-point seconds drift apart: ten times 0.1 s is not 1 s. Configurations, topologies and
records have seconds; they are converted where they are read or written.
"""

from __future__ import annotations

Nanoseconds = int
"""A moment or a duration."""

SECOND: Nanoseconds = 1_000_000_000


def from_seconds(seconds: float) -> Nanoseconds:
    """`seconds`, which must be finite, to the nearest nanosecond."""
    return round(seconds * SECOND)


def to_seconds(nanoseconds: Nanoseconds) -> float:
    return nanoseconds / SECOND


def next_multiple(period: Nanoseconds, after: Nanoseconds) -> Nanoseconds:
    """The first multiple of `period` (above 0) later than `after`: the k-th tick is at k × period."""
    return (after // period + 1) * period
