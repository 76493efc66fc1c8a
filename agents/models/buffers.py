"""A model's buffers: what it has beside its parameters, such as BatchNorm's running statistics.

Rules never see them. The aggregator's core averages those of the updates that a version is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.models.vectors import Vector, finite


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """All buffers of a model, each kind as one flat vector, in the module's order. Not changed."""

    floats: Vector
    """Shape (b,), float32."""
    integers: NDArray[np.int64]
    """Shape (i,); booleans among them as 0 and 1."""

    nbytes: int = field(init=False)
    """0 of a model without buffers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", self.floats.nbytes + self.integers.nbytes)

    def equals(self, other: Buffers) -> bool:
        """Whether both are the same to the bit."""
        return [one.tobytes() for one in self._arrays] == [one.tobytes() for one in other._arrays]

    def unfit(self, other: Buffers) -> str | None:
        """Why `other` cannot be buffers of the same model, or None."""
        sizes, expected = ([array.size for array in each._arrays] for each in (other, self))
        if sizes != expected:
            return f"another model: {sum(sizes)} numbers in its buffers, expected {sum(expected)}"
        if not finite(other.floats):
            return "buffers that are not finite, or whose norm is above 1.8e19"
        return None

    @property
    def _arrays(self) -> tuple[NDArray[Any], NDArray[Any]]:
        return self.floats, self.integers


NONE = Buffers(np.zeros(0, np.float32), np.zeros(0, np.int64))
"""Of a model without."""


def averaged(old: Buffers, contributions: Sequence[tuple[float, Buffers]], *, shares: bool) -> Buffers:
    """Buffers b of a new version, made of `contributions`, in the order of their arrival, with the
    weights ω_i that the rule gave them:

        floats:    b ← (1 − s) b + s Σ ω_i b_i / Σ ω_i
        integers:  those of the last

    s is 1: the weights of deltas and gradients are sizes of steps. Where they are `shares` of a mean of
    models, in which the old model has the rest, s is Σ ω_i, at most 1. Without weight b stays.
    """
    weights = np.array([weight for weight, _ in contributions])
    total, newest = float(weights.sum()), contributions[-1][1]
    if not total > 0:
        return Buffers(old.floats, newest.integers)
    share = min(1.0, total) if shares else 1.0
    mean = (weights / total) @ np.array([each.floats for _, each in contributions], np.float64)
    if share < 1:
        mean = (1 - share) * old.floats + share * mean
    return Buffers(mean.astype(np.float32), newest.integers)
