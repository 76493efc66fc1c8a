"""Settings of secure aggregation: the user's settings, and those of one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from agents.config import Count, Positive


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
class SecureRun:
    """Settings of secure aggregation in one run, on which its clients and its aggregator must agree."""

    clients: Sequence[str]
    """Names of all clients of the run, in device order."""
    updates: int
    """K, minimum number of updates in a sum."""
    largest_weight: int
    """A, largest weight of an update: weights are integers from 1 to A."""
    colluding: int
    """T: up to this many clients that collude with the server learn nothing about the others' masks."""
    needed: int
    """U, number of clients that must answer to open a sum."""
    range: float
    """R: coordinates of an update outside [−R, R] are clipped to it."""
    bits: int
    """Bits per coordinate: a coordinate has 2^bits − 1 possible values."""
    timeout: float
    """Seconds after which a sum without enough answers is lost."""
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
