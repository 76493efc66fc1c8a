"""Quantisation: conversion of real vectors to elements of the field, and of sums of these elements back
to real vectors.

A coordinate x in [−R, R] becomes an integer q in [−L, L], L = 2^(bits−1) − 1. The coordinate is rounded
at random to one of the two neighbouring values, so that the mean of the result is x: x = R q/L + an
error below R/L. A negative q is stored as p − |q|. A sum Σ a_i q_i of K updates with integer weights a_i
≤ A is at most K·A·L in magnitude, so it does not overflow if K·A·2^bits ≤ p. The error of this sum is
below (R/L)·Σ a_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.models.vectors import DIVERGED, Vector, finite
from agents.pipeline.secure.field import FIELD, Words

_BLOCK = 1 << 15


@dataclass(frozen=True, slots=True)
class Grid:
    """Values to which a coordinate is rounded."""

    range: float
    """R, largest magnitude of a coordinate."""
    bits: int
    """A coordinate has 2^bits − 1 possible values."""

    @property
    def levels(self) -> int:
        """L, number of steps from 0 to R."""
        return (1 << (self.bits - 1)) - 1

    @property
    def step(self) -> float:
        """R/L, distance between two neighbouring values."""
        return self.range / self.levels

    def round(self, vector: Vector, rng: np.random.Generator) -> tuple[Words, int]:
        """`vector`, shape (d,), as elements of the field, and the number of coordinates that were
        clipped to the range. Raises ValueError if it is not `finite`: without secure aggregation, the
        server would reject it."""
        if not finite(vector):
            raise ValueError(DIVERGED)
        words = np.empty(vector.size, np.uint32)
        outside = 0
        for start in range(0, vector.size, _BLOCK):
            part = vector[start : start + _BLOCK].astype(np.float64)
            outside += int(np.count_nonzero(np.abs(part) > self.range))
            part /= self.step
            part += rng.random(part.size)
            whole = np.floor(part, out=part).clip(-self.levels, self.levels).astype(np.int64)
            whole += FIELD.p * (whole < 0)
            words[start : start + _BLOCK] = whole
        return words, outside

    def as_sent(self, vector: Vector, rng: np.random.Generator) -> Vector:
        """`vector`, shape (d,), rounded with `rng` as in a sum; unchanged if it cannot be rounded."""
        try:
            return self.to_reals(self.round(vector, rng)[0])
        except ValueError:
            return vector

    def to_integers(self, words: Words) -> NDArray[np.int64]:
        """Sum of rounded vectors, from −(p − 1)/2 to (p − 1)/2 in units of `step`, shape (d,)."""
        whole = words.astype(np.int64)
        whole -= FIELD.p * (whole > FIELD.p // 2)
        return whole

    def to_reals(self, words: Words) -> Vector:
        """Sum of rounded vectors as float64, shape (d,)."""
        return self.to_integers(words) * self.step


def heaviest_share(weights: Sequence[int]) -> int:
    """Largest weight that one more update of a sum may have: the sum of the others' `weights`, or twice
    a single one."""
    return sum(weights) * (2 if len(weights) == 1 else 1)


def dominates(weights: Sequence[int]) -> bool:
    """The largest of `weights` is above the limit that `heaviest_share` returns for the others."""
    *others, largest = sorted(weights)
    return largest > heaviest_share(others)


def whole_weights(weights: Sequence[float], largest: int) -> list[int]:
    """Weights (0 to 1) of at least two updates in units of 1/`largest`, at least 1, and at most the
    limit that `heaviest_share` returns for the others."""
    whole = [max(1, round(largest * weight)) for weight in weights]
    *others, _ = sorted(whole)
    most = heaviest_share(others)
    return [min(weight, most) for weight in whole]


def overflow(updates: int, largest_weight: int, bits: int) -> str | None:
    """Why a sum of `updates` updates could overflow the field; None if it cannot."""
    if updates * largest_weight << bits <= FIELD.p:
        return None
    most = (FIELD.p // (updates * largest_weight)).bit_length() - 1
    return (
        f"{updates} updates × weights up to {largest_weight} × a range of 2^{bits} is more than the "
        f"field's p = 2^31 − 1: lower bits to {most} or less"
    )
