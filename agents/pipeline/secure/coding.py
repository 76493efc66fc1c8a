"""Lagrange coding of masks: any U shares of a mask restore it, and any T shares reveal nothing about it
(Yu et al. 2019, arXiv 1806.00939; So et al. 2022, arXiv 2109.14236, section 4.1).

A mask is cut into U − T blocks z_1, …, z_{U−T}, followed by T blocks of noise. The blocks are the values
at β_1, …, β_U of one polynomial of degree U − 1, and share j is its value at α_j. The code is linear: a
weighted sum of shares is the share of the weighted sum of masks, so only that sum has to be decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.pipeline.secure.field import FIELD, Field, Words
from agents.pipeline.secure.settings import SecureRun


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
