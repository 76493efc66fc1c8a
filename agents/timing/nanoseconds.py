"""Time as whole nanoseconds (int), so that equal moments compare as equal.

Sums of floating-point seconds have rounding errors: 0.1 s added ten times is not 1 s. Topologies
and records use seconds, which are converted when they are read or written.
"""

from __future__ import annotations

Nanoseconds = int
"""Moment or duration."""

SECOND: Nanoseconds = 1_000_000_000


def from_seconds(seconds: float) -> Nanoseconds:
    """Convert `seconds`, which must be finite, to the nearest nanosecond."""
    return round(seconds * SECOND)


def to_seconds(nanoseconds: Nanoseconds) -> float:
    return nanoseconds / SECOND


def next_multiple(period: Nanoseconds, after: Nanoseconds) -> Nanoseconds:
    """First multiple of `period`, which is above 0, after `after`."""
    return (after // period + 1) * period
