"""Settings and arithmetic of secure aggregation: the field, rounding to its elements, and the code of
masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from agents.config import Count, Positive
from agents.models.vectors import DIVERGED, Vector, finite


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureParameters:
    """Secure aggregation (docs/concepts/privacy.md): the server learns sums of updates, but no single
    update.

    The protocol is asynchronous LightSecAgg (So et al. 2022, arXiv 2109.14236)."""

    colluding: Annotated[int, "count from 0"] = 1
    """T: up to this many clients that collude with the server learn nothing about the others' masks."""
    needed: Count | None = None
    """U, number of clients that must answer to open a sum; the other N − U may be absent. Must be above
    T. A larger U makes shares shorter: a share is 1/(U − T) of a model. None for the default: 0.7 N
    rounded up, and at least T + 1."""
    range: Positive = 1.0
    """R: coordinates of an update outside [−R, R] are clipped to it."""
    bits: Annotated[int, "count"] = 16
    """Each coordinate is rounded at random to one of 2^bits − 1 values in the range."""
    weights: Count = 64
    """A: the rule's weights are rounded to multiples of 1/A."""
    timeout: Annotated[float, "s above 0"] = 60.0
    """Seconds after which a buffer without enough answers is given up."""

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 30:
            raise ValueError(f"bits is {self.bits}, expected from 2 to 30")
        if self.needed is not None and self.needed <= self.colluding:
            raise ValueError(f"needed is {self.needed}, expected above colluding (T), {self.colluding}")

    def needed_of(self, clients: int) -> int:
        """Return U for a run with `clients` clients."""
        return self.needed or max(self.colluding + 1, math.ceil(0.7 * clients))


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureRun(SecureParameters):
    """Settings of secure aggregation in one run, on which its clients and its aggregator must agree.
    `weights` is 1 if the rule weights all updates alike."""

    clients: Sequence[str]
    """Names of all clients of the run, in device order."""
    updates: int
    """K, minimum number of updates in a sum."""
    needed: int
    """U, number of clients that must answer to open a sum."""
    norm: float | None = None
    """Upper bound of the ℓ2 norm of an update in a sum; None if no bound is known."""

    @property
    def most_shares(self) -> int:
        """Shares of masks that a client keeps.

        At most K + N shares are useful at the same time: one for each update of a buffer, and one more
        per client. The maximum is twice this number, or K + N + T(K + 1) if that is more. Of too many,
        the oldest of the client with the most shares is deleted. So T colluding clients cannot displace
        a useful share.
        """
        useful = self.updates + len(self.clients)
        return useful + max(useful, self.colluding * (self.updates + 1))


# Arithmetic modulo a Mersenne prime p = 2^bits − 1, on arrays.
#
# Elements are unsigned integers below p. 2^bits is 1 modulo p, so a number is reduced by adding its high
# bits to its low bits, which NumPy does at memory speed. Matrix products are computed by BLAS in
# float64. The elements are split into halves of 16 bits, so that sums of products are exact.

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


# Quantisation: conversion of real vectors to elements of the field, and of sums of these elements back
# to real vectors.
#
# A coordinate x in [−R, R] becomes an integer q in [−L, L], L = 2^(bits−1) − 1. The coordinate is
# rounded at random to one of the two neighbouring values, so that the mean of the result is x: x = R q/L
# + an error below R/L. A negative q is stored as p − |q|. A sum Σ a_i q_i of K updates with integer
# weights a_i ≤ A is at most K·A·L in magnitude, so it does not overflow if K·A·2^bits ≤ p. The error of
# this sum is below (R/L)·Σ a_i.

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


# Lagrange coding of masks: any U shares of a mask restore it, and any T shares reveal nothing about it
# (Yu et al. 2019, arXiv 1806.00939; So et al. 2022, arXiv 2109.14236, section 4.1).
#
# A mask is cut into U − T blocks z_1, …, z_{U−T}, followed by T blocks of noise. The blocks are the
# values at β_1, …, β_U of one polynomial of degree U − 1, and share j is its value at α_j. The code is
# linear: a weighted sum of shares is the share of the weighted sum of masks, so only that sum has to be
# decoded.


@dataclass(frozen=True, slots=True)
class MaskCode:
    """Code for masks of `size` elements with N = `parties` holders of shares, numbered from 0."""

    parties: int
    """N, number of holders."""
    needed: int
    """U, number of shares that restore a mask."""
    colluding: int
    """T, number of shares that reveal nothing about a mask."""
    size: int
    """Number of elements of a mask."""
    field: Field = FIELD

    def __post_init__(self) -> None:
        problem = code_problem(self.parties, self.needed, self.colluding)
        if problem is not None:
            raise ValueError(problem)
        if self.parties + self.needed > self.field.p:
            raise ValueError(
                f"{self.parties} holders and U = {self.needed} require {self.parties + self.needed} "
                f"different elements, but the field has only {self.field.p}"
            )

    @property
    def length(self) -> int:
        """Number of elements of one share."""
        return -(-self.size // (self.needed - self.colluding))

    @property
    def _betas(self) -> range:
        return range(1, self.needed + 1)

    def _alphas(self, holders: Sequence[int]) -> list[int]:
        return [self.needed + 1 + holder for holder in holders]

    def shares(self, mask: Words, noise: Words, holders: Sequence[int]) -> Words:
        """One row per holder: shape (holders, length). `mask`: shape (size,); `noise`: uniform elements,
        shape (T · length,)."""
        blocks = np.zeros((self.needed, self.length), np.uint32)
        blocks.reshape(-1)[: self.size] = mask
        blocks[self.needed - self.colluding :] = noise.reshape(self.colluding, self.length)
        matrix = lagrange_matrix(self._betas, self._alphas(holders), self.field)
        return self.field.product(matrix, blocks)

    def mask(self, holders: Sequence[int], shares: Words) -> Words:
        """Restore a mask, shape (size,), from the shares of U different `holders`."""
        matrix = lagrange_matrix(
            self._alphas(holders), self._betas[: self.needed - self.colluding], self.field
        )
        return self.field.product(matrix, shares).reshape(-1)[: self.size]


def code_of(settings: SecureRun, size: int) -> MaskCode:
    """Return the code for the masks of a run, for a model of `size` parameters."""
    return MaskCode(len(settings.clients), settings.needed, settings.colluding, size)


def code_problem(parties: int, needed: int, colluding: int) -> str | None:
    """Why N = `parties`, U and T do not fit together; None if they do."""
    if not 1 <= needed <= parties:
        return f"needed (U) is {needed}, expected from 1 to the number of clients, {parties}"
    if not 0 <= colluding < needed:
        return f"colluding (T) is {colluding}, expected from 0 to below needed (U), {needed}"
    return None


def split_problem(parties: int, needed: int) -> str | None:
    """Why the server could open two sums that differ by one update; None if it cannot.

    If U is at most N/2, there are two disjoint sets of U holders. Each could answer for a different sum,
    and the difference of the sums would reveal that update.
    """
    if 2 * needed > parties:
        return None
    return (
        f"needed (U) is {needed}, expected more than half of the number of clients, {parties}: "
        f"otherwise two sets of {needed} could answer for two sums that differ by one update. "
        f"Write needed: {parties // 2 + 1}, or more"
    )


def lagrange_matrix(points: Sequence[int], targets: Sequence[int], field: Field) -> NDArray[np.uint64]:
    """Return the matrix that maps a polynomial's values at `points` to its values at `targets`: shape
    (targets, points). No target may be one of the points."""
    p = field.p
    weights = []
    for x in points:
        product = 1
        for other in points:
            product = product * (x - other) % p if other != x else product
        weights.append(pow(product, -1, p))
    rows = []
    for t in targets:
        whole = 1
        for x in points:
            whole = whole * (t - x) % p
        rows.append(
            [whole * weight * pow(t - x, -1, p) % p for x, weight in zip(points, weights, strict=True)]
        )
    return np.array(rows, np.uint64)
