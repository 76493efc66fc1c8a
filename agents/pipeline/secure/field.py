"""Arithmetic modulo a Mersenne prime p = 2^bits − 1, on arrays.

Elements are unsigned integers below p. 2^bits is 1 modulo p, so a number is reduced by adding its high
bits to its low bits, which NumPy does at memory speed. Matrix products are computed by BLAS in
float64. The elements are split into halves of 16 bits, so that sums of products are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
_HALF = 16
_COLUMNS = 1 << 13
"""Columns of a product in one step: more would not stay in the processor's cache."""
_MAX_INNER = 1 << 12
"""Terms of a sum of products of 16-bit halves: the sum is at most 2^12 · 2^(16+16), below 2^53, so
float64 is exact. The combined halves are below 2^63."""


@dataclass(frozen=True, slots=True)
class Field:
    """The integers modulo 2^bits − 1, which must be prime: bits is 3, 5, 7, 13, 17, 19 or 31."""

    bits: int = 31

    def __post_init__(self) -> None:
        if self.bits not in (3, 5, 7, 13, 17, 19, 31):
            raise ValueError(
                f"bits is {self.bits}, expected 3, 5, 7, 13, 17, 19 or 31 (2^bits − 1 must be prime)"
            )

    @property
    def p(self) -> int:
        return (1 << self.bits) - 1

    def reduce(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Modulo p, in place."""
        p, bits = np.uint64(self.p), np.uint64(self.bits)
        bound = 1 << 64
        while bound > 2 * self.p:
            high = values >> bits
            values &= p
            values += high
            bound = self.p + (bound >> self.bits) + 1
        # x − p wraps around if it is negative, so the smaller of x and x − p is below p.
        np.minimum(values, values - p, out=values)
        return values

    def product(self, left: NDArray[Any], right: Words) -> Words:
        """Shapes (n, k) and (k, m)."""
        rows, inner = left.shape
        if inner > _MAX_INNER:
            raise ValueError(f"sums of {inner} products are not exact, expected at most {_MAX_INNER}")
        low_mask = np.uint64((1 << _HALF) - 1)
        whole = left.astype(np.uint64)
        halves = np.concatenate([whole >> np.uint64(_HALF), whole & low_mask]).astype(np.float64)
        high_unit, unit = (np.uint64(pow(2, n * _HALF, self.p)) for n in (2, 1))
        result = np.empty((rows, right.shape[1]), np.uint32)
        for start in range(0, right.shape[1], _COLUMNS):
            part = right[:, start : start + _COLUMNS]
            high = halves @ (part >> np.uint32(_HALF)).astype(np.float64)
            low = halves @ (part & np.uint32(low_mask)).astype(np.float64)
            middle = self.reduce((high[rows:] + low[:rows]).astype(np.uint64))
            middle *= unit
            middle += low[rows:].astype(np.uint64)
            middle += high[:rows].astype(np.uint64) * high_unit
            result[:, start : start + _COLUMNS] = self.reduce(middle)
        return result

    def sum(self, left: Words, right: Words) -> Words:
        """Elementwise."""
        total: Words = left + right  # below 2^32
        np.minimum(total, total - np.uint32(self.p), out=total)
        return total

    def difference(self, left: Words, right: Words) -> Words:
        """Elementwise."""
        total: Words = left - right
        np.minimum(total, total + np.uint32(self.p), out=total)
        return total


FIELD = Field()
"""Field of every run: 2^31 − 1 is the largest Mersenne prime that fits the 32-bit words on the wire."""
