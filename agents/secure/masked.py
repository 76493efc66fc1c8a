"""A masked update, as it travels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agents.secure.field import Words
from agents.timing.nanoseconds import Nanoseconds

DIVERGED = -1
_MAX_HOLDERS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """An update of which only sums can be read."""

    words: Words
    """Shape (d,): the rounded vector (of a `model`, its difference to the one that it was trained from)
    plus the mask. Below p only once that has been checked."""
    holders: tuple[int, ...]
    """Places, among the run's clients, of those that were sent a share of the mask."""
    outside: int
    """Coordinates that were outside of the range and were cut to it; DIVERGED: some were not finite, and
    the words mean nothing."""
    took: Nanoseconds = 0
    """From when the client began to make the mask until its shares were on their way."""


def bits_of(holders: Iterable[int]) -> str:
    """As a hexadecimal number with a bit for each of them."""
    return f"{sum(1 << holder for holder in holders):x}"


def holders_of(bits: str) -> tuple[int, ...]:
    """Raises ValueError."""
    if not 0 < len(bits) <= _MAX_HOLDERS // 4 or not set(bits) <= set("0123456789abcdef"):
        raise ValueError("holders that are no hexadecimal number")
    number = int(bits, 16)
    return tuple(place for place in range(number.bit_length()) if number >> place & 1)
