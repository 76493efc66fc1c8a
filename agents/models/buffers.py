"""Buffers of a model: its state apart from the parameters, such as BatchNorm's running statistics.

Rules never see the buffers. The aggregator's core averages the buffers of the updates in each version.
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
    """In the module's order, as a flat vector of floats and one of integers, which are never changed."""

    floats: Vector
    """Floating-point buffers, shape (b,), float32."""
    integers: NDArray[np.int64]
    """Integer and Boolean (0 and 1) buffers, shape (i,), int64."""

    nbytes: int = field(init=False)
    """0 for a model without buffers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", self.floats.nbytes + self.integers.nbytes)

    def equals(self, other: Buffers) -> bool:
        """Bitwise."""
        return [one.tobytes() for one in self._arrays] == [one.tobytes() for one in other._arrays]

    def unfit(self, other: Buffers) -> str | None:
        """Why `other` cannot be buffers of the same model; None if it can."""
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
"""Empty buffers, for a model without buffers."""


def averaged(old: Buffers, contributions: Sequence[tuple[float, Buffers]], *, shares: bool) -> Buffers:
    """Return the buffers b of a new version. `contributions` are (ω_i, b_i) in the order of arrival,
    where ω_i is the weight that the rule gave to update i:

        floats:    b ← (1 − s) b + s Σ ω_i b_i / Σ ω_i
        integers:  those of the last contribution

    For deltas and gradients, s is 1, because their weights are step sizes. With `shares`, the weights
    are shares in a mean of models. Then s is Σ ω_i, which is at most 1, and the old model has the
    remaining share 1 − s. If all weights are 0, the floats are unchanged.
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
