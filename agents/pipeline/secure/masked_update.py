"""A masked update and its form on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from agents.pipeline.secure.field import Words
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.payloads import Encoded

FIELD = "holders"
"""Marks a masked update in the header."""
DIVERGED = -1
"""`outside` of an update that cannot be rounded, because training diverged."""
_MAX_HOLDERS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """Hidden by a mask: only sums of such updates can be read."""

    words: Words
    """Rounded update plus mask, shape (d,); for an update of kind `model`, the rounded difference to the
    model that it was trained from, plus the mask. Received words may be p or more until they have been
    checked."""
    holders: tuple[int, ...]
    """Clients that were sent a share of the mask, as indices into the run's list."""
    outside: int
    """Coordinates that were clipped to the range; DIVERGED, without usable `words`, if the update could
    not be rounded."""
    took: Nanoseconds = 0
    """Nanoseconds from the start of making the mask until its shares were sent."""

    @property
    def encoded(self) -> Encoded:
        """Header fields and array, as they are sent."""
        numbers = {"outside": str(self.outside), "took": str(self.took)}
        words = np.ascontiguousarray(self.words, "<u4")
        return Encoded({FIELD: bits_of(self.holders), **numbers}, {"masked": words})

    @classmethod
    def from_encoded(cls, encoded: Encoded) -> Masked:
        """Raises ValueError."""
        fields, arrays = encoded.fields, encoded.arrays
        if fields.keys() != {FIELD, "outside", "took"} or [*arrays] != ["masked"]:
            raise ValueError(
                f"unexpected fields {', '.join(fields):.80} or arrays {', '.join(arrays):.80}"
            )
        if (words := arrays["masked"]).dtype != np.dtype("<u4"):
            raise ValueError(f"words of type {words.dtype}, expected uint32")
        return cls(words, holders_of(fields[FIELD]), int(fields["outside"]), int(fields["took"]))


def bits_of(holders: Iterable[int]) -> str:
    """Hexadecimal number with one bit set per holder."""
    return f"{sum(1 << holder for holder in holders):x}"


def holders_of(bits: str) -> tuple[int, ...]:
    """Inverse of `bits_of`. Raises ValueError."""
    if not 0 < len(bits) <= _MAX_HOLDERS // 4 or not set(bits) <= set("0123456789abcdef"):
        raise ValueError("holders: expected a hexadecimal number")
    number = int(bits, 16)
    return tuple(place for place in range(number.bit_length()) if number >> place & 1)
