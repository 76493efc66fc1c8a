"""What the numbers that a user may set have to be; None, for one that is not given, is always fine."""

from __future__ import annotations

import math


def positive(name: str, value: float | None) -> None:
    """Raises ValueError, unless it is above 0 and finite."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} is {value:g}, expected above 0")


def duration(name: str, seconds: float | None) -> None:
    """Raises ValueError, unless it is finite and a nanosecond or more."""
    positive(name, seconds)
    if seconds is not None and seconds < 1e-9:
        raise ValueError(f"{name} is {seconds:g} s, expected at least 1e-09 s")


def at_least(name: str, value: float | None, least: float) -> None:
    """Raises ValueError."""
    if value is not None and not value >= least:
        raise ValueError(f"{name} is {value:g}, expected at least {least:g}")
