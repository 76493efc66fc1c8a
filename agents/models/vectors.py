"""Models as flat vectors, in place and without temporary arrays of a model's size."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
