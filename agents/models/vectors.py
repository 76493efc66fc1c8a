"""Models as flat vectors: arithmetic in place, and the buffers beside the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[Any]
"""Shape (d,). float32 in messages; the arithmetic keeps the float type of its arguments."""

_BLOCK = 1 << 15
"""Elements whose temporary arrays fit into the processor's cache."""
_LARGEST = float(np.finfo(np.float32).max)
DIVERGED = "not finite, or its norm is above 1.8e19: local training diverged"
"""Result of `unfit` for a vector that is not `finite`."""


def add_scaled(target: Vector, vector: Vector, scale: float) -> None:
    """target ← target + scale · vector, shape (d,)."""
    if scale == 1.0:
        np.add(target, vector, out=target)
        return
    scratch = np.empty(min(_BLOCK, target.size), target.dtype)
    for start in range(0, target.size, _BLOCK):
        part = target[start : start + _BLOCK]
        product = scratch[: part.size]
        np.multiply(vector[start : start + _BLOCK], scale, out=product)
        np.add(part, product, out=part)


def add_and_clear(target: Vector, source: Vector, scale: float) -> None:
    """target ← target + scale · source and source ← 0, shape (d,)."""
    for start in range(0, target.size, _BLOCK):
        part, addend = target[start : start + _BLOCK], source[start : start + _BLOCK]
        np.multiply(addend, scale, out=addend)
        np.add(part, addend, out=part)
        addend.fill(0)


def mix(target: Vector, vector: Vector, share: float) -> None:
    """target ← (1 − share) · target + share · vector, shape (d,).

    Computed as target + share · (vector − target), so that mixing equal vectors changes no bit. If
    `share` is 1 in the vectors' precision, the result is an exact copy of `vector`.
    """
    if target.dtype.type(share) == 1:
        np.copyto(target, vector)
        return
    scratch = np.empty(min(_BLOCK, target.size), target.dtype)
    for start in range(0, target.size, _BLOCK):
        part = target[start : start + _BLOCK]
        step = scratch[: part.size]
        np.subtract(vector[start : start + _BLOCK], part, out=step)
        np.multiply(step, share, out=step)
        np.add(part, step, out=part)


def trimmed_mean(rows: Sequence[Vector], k: int, weights: Sequence[float]) -> Vector:
    """Weighted mean of each coordinate without the k smallest and the k largest values; shape (d,).

    `rows`: n > 2k vectors of shape (d,), with weights of at least 0. If all remaining weights are 0, the
    mean is 0. The order of the rows changes no bit. Of two equal values, the one with the smaller weight
    counts as the smaller one.
    """
    n, first = len(rows), rows[0]
    mean = np.zeros_like(first)
    ascending = np.argsort(weights)
    rows, weight = [rows[i] for i in ascending], np.array(weights)[ascending]
    for start in range(0, first.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        values = np.array([row[part] for row in rows])
        if weight[0] == weight[-1]:
            values.sort(axis=0)
            np.mean(values[k : n - k], axis=0, out=mean[part])
            continue
        middle = np.argsort(values, axis=0, kind="stable")[k : n - k]
        weights_left = weight[middle]
        total = (weights_left * np.take_along_axis(values, middle, axis=0)).sum(axis=0)
        total_weight = weights_left.sum(axis=0)
        np.divide(total, total_weight, out=mean[part], where=total_weight > 0)
    return mean


def norm(vector: Vector) -> float:
    """‖vector‖; infinity if it is not `finite`. The sum is in float64: in float32 the norm of 30 million
    equal elements would be 0.3 % too small. It depends neither on BLAS's kernels nor on its number of
    threads."""
    scratch, squares = np.empty(min(_BLOCK, vector.size)), 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, vector.size, _BLOCK):
            block = vector[start : start + _BLOCK]
            part = scratch[: block.size]
            np.copyto(part, block)
            squares += float(np.einsum("i,i", part, part))
    return math.sqrt(squares) if squares <= _LARGEST else math.inf


def finite(vector: Vector) -> bool:
    """All elements and the square of the norm are finite in the vector's precision; in float32, the norm
    may be at most 1.8e19. One pass, and faster than `norm`."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(np.dot(vector, vector))


def unfit(vector: Vector, w: Vector) -> str | None:
    """Why `vector` cannot be combined with `w`, shape (d,); None if it can."""
    if vector.shape != w.shape:
        return f"another model: {vector.size} parameters, expected {w.size}"
    if not finite(vector):
        return DIVERGED
    return None


# Buffers of a model: its state apart from the parameters, such as BatchNorm's running statistics.
#
# Rules never see the buffers. The aggregator's core averages the buffers of the updates in each version.


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
