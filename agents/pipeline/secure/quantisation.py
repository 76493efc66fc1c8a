"""Vectors of real numbers as elements of the field, and sums of them back.

A coordinate x of [−R, R] becomes a whole number of [−L, L] with L = 2^(bits−1) − 1, rounded at random to
one of its two neighbours so that its mean is x: x = R q/L + an error below R/L. Negative ones are
p − |q|. A sum Σ a_i q_i with whole a_i of at most A is below K·A·L in magnitude, so that none of K
updates overflows as long as K·A·2^bits is at most p; its error is below (R/L)·Σ a_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.models.vectors import Vector
from agents.pipeline.secure.field import FIELD, Words

_BLOCK = 1 << 15


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers that a coordinate is rounded to."""

    range: float
    """R."""
    bits: int

    @property
    def levels(self) -> int:
        """L."""
        return (1 << (self.bits - 1)) - 1

    @property
    def step(self) -> float:
        """R/L."""
        return self.range / self.levels

    def round(self, vector: Vector, rng: np.random.Generator) -> tuple[Words, int]:
        """`vector`, shape (d,), and how many coordinates were outside of the range and are cut to it.
        Raises ValueError for what is not finite."""
        words = np.empty(vector.size, np.uint32)
        outside = 0
        for start in range(0, vector.size, _BLOCK):
            part = vector[start : start + _BLOCK].astype(np.float64)
            if not np.isfinite(part).all():
                raise ValueError("not finite")
            outside += int(np.count_nonzero(np.abs(part) > self.range))
            part /= self.step
            part += rng.random(part.size)
            whole = np.floor(part, out=part).clip(-self.levels, self.levels).astype(np.int64)
            whole += FIELD.p * (whole < 0)
            words[start : start + _BLOCK] = whole
        return words, outside

    def as_sent(self, vector: Vector, rng: np.random.Generator) -> Vector:
        """What a sum has of `vector`, rounded with `rng`; one that is not finite as it is."""
        try:
            return self.to_reals(self.round(vector, rng)[0])
        except ValueError:
            return vector

    def to_integers(self, words: Words) -> NDArray[np.int64]:
        """A sum of such vectors in steps, shape (d,): from −(p − 1)/2 to (p − 1)/2."""
        whole = words.astype(np.int64)
        whole -= FIELD.p * (whole > FIELD.p // 2)
        return whole

    def to_reals(self, words: Words) -> Vector:
        """A sum of such vectors as float64, shape (d,)."""
        return self.to_integers(words) * self.step


def heaviest_share(weights: Sequence[int]) -> int:
    """The largest weight that one update of a sum may have beside the others' `weights`: as much as all
    of these together; beside a single one, twice as much."""
    return sum(weights) * (2 if len(weights) == 1 else 1)


def dominates(weights: Sequence[int]) -> bool:
    """Whether an update of a sum with these weights counts for more than it may (`heaviest`)."""
    *others, largest = sorted(weights)
    return largest > heaviest_share(others)


def whole_weights(weights: Sequence[float], largest: int) -> list[int]:
    """Weights from 0 to 1 of the updates of a sum, two or more, as multiples of 1/`largest`: each at
    least 1, and none that `dominates`, which is lowered."""
    whole = [max(1, round(largest * weight)) for weight in weights]
    *others, _ = sorted(whole)
    most = heaviest_share(others)
    return [min(weight, most) for weight in whole]


def overflow(updates: int, largest_weight: int, bits: int) -> str | None:
    """Why a sum of so many updates could leave the field, or None."""
    if updates * largest_weight << bits <= FIELD.p:
        return None
    most = (FIELD.p // (updates * largest_weight)).bit_length() - 1
    return (
        f"{updates} updates × weights up to {largest_weight} × a range of 2^{bits} is more than the "
        f"field's p = 2^31 − 1: lower bits to {most} or less"
    )
