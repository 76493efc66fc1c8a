"""A masked update, as it travels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from agents.pipeline.secure.field import Words
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.payloads import Encoded

FIELD = "holders"
"""Field of the header by which a masked update is known."""
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

    @property
    def encoded(self) -> Encoded:
        """As it travels."""
        numbers = {"outside": str(self.outside), "took": str(self.took)}
        words = np.ascontiguousarray(self.words, "<u4")
        return Encoded({FIELD: bits_of(self.holders), **numbers}, {"masked": words})

    @classmethod
    def from_encoded(cls, encoded: Encoded) -> Masked:
        """What was `encoded`. Raises ValueError."""
        fields, arrays = encoded.fields, encoded.arrays
        if fields.keys() != {FIELD, "outside", "took"} or [*arrays] != ["masked"]:
            raise ValueError(f"fields {', '.join(fields):.80}, arrays {', '.join(arrays):.80}")
        if (words := arrays["masked"]).dtype != np.dtype("<u4"):
            raise ValueError(f"words of type {words.dtype}")
        return cls(words, holders_of(fields[FIELD]), int(fields["outside"]), int(fields["took"]))


def bits_of(holders: Iterable[int]) -> str:
    """As a hexadecimal number with a bit for each of them."""
    return f"{sum(1 << holder for holder in holders):x}"


def holders_of(bits: str) -> tuple[int, ...]:
    """Raises ValueError."""
    if not 0 < len(bits) <= _MAX_HOLDERS // 4 or not set(bits) <= set("0123456789abcdef"):
        raise ValueError("holders that are no hexadecimal number")
    number = int(bits, 16)
    return tuple(place for place in range(number.bit_length()) if number >> place & 1)
