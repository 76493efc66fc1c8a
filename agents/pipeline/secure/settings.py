"""Settings of secure aggregation: a user's, and those of a run as its processes share them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from agents.config import Count, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Secure:
    """Secure aggregation (docs/concepts/privacy.md): the server gets sums of updates, and no single one.

    LightSecAgg, asynchronous (So et al. 2022, arXiv 2109.14236)."""

    colluding: Annotated[int, "count from 0"] = 1
    """T: what up to so many clients together with the server know tells nothing of the others' masks."""
    needed: Count | None = None
    """U: so many clients have to answer for a sum to be opened; N − U may be away. Above T; the larger,
    the shorter are the shares, of 1/(U − T) of a model each. None: 0.7 N, rounded up, and above T."""
    range: Positive = 1.0
    """A coordinate of an update beyond ± so much is cut to it."""
    bits: Annotated[int, "count"] = 16
    """A coordinate is rounded, at random, to one of 2^bits − 1 numbers in the range."""
    weights: Count = 64
    """Where the rule weights updates, weights are whole multiples of 1 over this."""
    timeout: Annotated[float, "s above 0"] = 60.0
    """Without enough answers after so long, a buffer is given up."""

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 30:
            raise ValueError(f"bits is {self.bits}, expected from 2 to 30")
        if self.needed is not None and self.needed <= self.colluding:
            raise ValueError(f"needed is {self.needed}, expected above colluding (T), {self.colluding}")

    def needed_of(self, clients: int) -> int:
        """U of a run with so many clients."""
        return self.needed or max(self.colluding + 1, math.ceil(0.7 * clients))


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureRun:
    """Secure aggregation of one run, as its clients and its aggregator have to agree on it."""

    clients: Sequence[str]
    """All of the run, in device order."""
    updates: int
    """K: a sum of fewer is not opened."""
    largest_weight: int
    """A: weights are whole numbers from 1 to this."""
    colluding: int
    needed: int
    range: float
    bits: int
    timeout: float
    norm: float | None = None
    """Upper bound of the ℓ2 norm of an update as it is summed; None: none is known."""

    @property
    def most_shares(self) -> int:
        """Maximum number of shares of masks that a client keeps.

        At once K + N can be of use: those of a buffer's updates and of one more update of each client.
        Room for as many again, or, if that is more, for T(K + 1): then T colluding clients can evict
        none that is of use, as the oldest share of the client with most of them goes first."""
        useful = self.updates + len(self.clients)
        return useful + max(useful, self.colluding * (self.updates + 1))
