"""Checks of numbers that a user may set. None passes every check."""

from __future__ import annotations

import math


class DeclarationError(ValueError):
    """A rule violates what it has declared (`agents.rules.client_half.ClientSide`), or a selection
    chooses a client that it must not. The message says how."""


def positive(name: str, value: float | None) -> None:
    """Raise ValueError unless `value` is above 0 and finite."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} is {value:g}, expected above 0")


def duration(name: str, seconds: float | None) -> None:
    """Raise ValueError unless `seconds` is finite and at least 1 ns."""
    positive(name, seconds)
    if seconds is not None and seconds < 1e-9:
        raise ValueError(f"{name} is {seconds:g} s, expected at least 1e-09 s")


def at_least(name: str, value: float | None, least: float) -> None:
    """Raise ValueError unless `value` is at least `least`."""
    if value is not None and not value >= least:
        raise ValueError(f"{name} is {value:g}, expected at least {least:g}")
