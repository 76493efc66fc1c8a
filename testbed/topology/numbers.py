"""Numbers in files from elsewhere: surveys, traces, logs."""

from __future__ import annotations

import math
from contextlib import suppress

from agents.texts import describe_value

_LARGEST = 1e15
"""Sums, products and quotients of some numbers from its inverse up to it are finite."""


def read_number(
    value: object,
    name: str,
    unit: str = "",
    *,
    least: float = 0.0,
    most: float = _LARGEST,
    above: bool = False,
) -> float:
    """`value`: a number, or its text. `above`: whether it must be above `least`. Raises ValueError that
    names `name`, the value, and what was expected."""
    found = math.nan
    if isinstance(value, str) and value.isascii() and "_" not in value:
        with suppress(ValueError):
            found = float(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value) if abs(value) <= _LARGEST else math.inf
    if (least + 1 / _LARGEST if above else least) <= found <= most:
        return found
    expected = f"above {least:g}" if above else f"of at least {least:g}"
    if most < _LARGEST:
        expected = f"from {least:g} to {most:g}"
    told = f"{value!r:.40}" if isinstance(value, str) else describe_value(value)
    raise ValueError(f"{name} is {told}, expected a number {expected}{f' ({unit})' if unit else ''}")
