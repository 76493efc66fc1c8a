"""Building blocks of rules: sums of updates, plain and robust, a set of clients of which only some train
at once, checks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from agents.models.vectors import Vector, add_scaled, mix, pour, trimmed_mean
from agents.rules.interface import Aggregated, Contribution, Server, SumUp, Update

Trim = float | Literal["median"]
"""Share of the updates that is left out at each end of every coordinate; `median`: as many as leave one
or two."""


def gathered(server: Server, trim: Trim) -> WeightedSum | RobustSum:
    """What gathers the updates for the next version."""
    return RobustSum(server, trim) if trim else WeightedSum(server)


def check_trim(trim: Trim, updates: int | None = None) -> None:
    """Raise ValueError, unless it is `median` or from 0 to below 0.5, and leaves out any of `updates`,
    where it is known that an aggregation has so many."""
    if trim != "median" and not 0 <= trim < 0.5:
        raise ValueError(f"trim is {trim:g}, expected from 0 to below 0.5, or median")
    if not trim or updates is None or trimmed(updates, trim):
        return
    if updates < 3:
        raise ValueError(f"trim needs aggregations of 3 updates or more, and they have {updates}")
    least = math.ceil(100 / updates) / 100
    raise ValueError(
        f"trim is {trim}, which of {updates} updates is none: raise it to {least:g} or more"
    )


def trimmed(updates: int, trim: Trim) -> int:
    """How many of `updates` values are left out at each end of a coordinate; one is left at least."""
    most = (updates - 1) // 2
    return most if trim == "median" else min(most, int(trim * updates + 1e-9))


class WeightedSum:
    """Σ a_i v_i of the updates gathered for the next version; the single updates are not kept."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.vector = np.zeros_like(server.w)
        self.contributions: list[Contribution] = []
        """With a_i as weight."""

    def __len__(self) -> int:
        """How many updates are in it."""
        return len(self.contributions)

    @property
    def weight(self) -> float:
        """Σ a_i."""
        return sum(contribution.weight for contribution in self.contributions)

    def add(self, update: Update, weight: float = 1.0, *, times: int = 1) -> None:
        """Take `update` with a = `weight`, so many times."""
        weight *= times
        add_scaled(self.vector, update.vector, weight)
        self.contributions.append(update.contribution(weight))

    def apply(self, scale: float = 1.0, *, sign: int = 1) -> Aggregated:
        """w ← w + sign · scale · Σ a_i v_i, with weights scale · a_i in the log; then start anew."""
        self._move(sign * scale)
        used, self.contributions = self.contributions, []
        return self._server.aggregated(used, scale)

    def _move(self, scale: float) -> None:
        pour(self._server.w, self.vector, scale)


class SumOfModels(WeightedSum):
    """A `WeightedSum` of updates that began with the w that it is added to, and of which any may be the
    model w_i that Δ_i leads to (`ClientSide.as_model`):

        w ← w + s·Σ a_i Δ_i   is   w ← (1 − s·A) w + s·A·m,   A = Σ a_i,   m = Σ a_i w_i / A

    m is kept as a running mean: of one model, and of equal ones, it is that to the last bit, and so is w
    where s·A = 1. What comes as a delta is summed up beside it.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.vector = self._mean = np.zeros(0, server.w.dtype)  # each is made when it is needed
        self._total = 0.0
        """A, of the models."""

    def add(self, update: Update, weight: float = 1.0, *, times: int = 1) -> None:
        """As `WeightedSum.add`."""
        if update.kind != "model":
            if not self.vector.size:
                self.vector = np.zeros_like(self._server.w)
            super().add(update, weight, times=times)
            return
        if not self._mean.size:
            self._mean = np.empty_like(self._server.w)
        weight *= times
        self._total += weight
        mix(self._mean, update.vector, weight / self._total)
        self.contributions.append(update.contribution(weight))

    def _move(self, scale: float) -> None:
        if self._total:
            mix(self._server.w, self._mean, scale * self._total)
            self._total = 0.0
        if self.vector.size:
            super()._move(scale)


class MaskedSum:
    """A `WeightedSum` of updates that nobody can read before they are summed up: it keeps the weights,
    which are at most 1."""

    def __init__(self) -> None:
        self.contributions: list[Contribution] = []

    def __len__(self) -> int:
        return len(self.contributions)

    def add(self, update: Update, weight: float = 1.0) -> None:
        """As `WeightedSum.add`."""
        self.contributions.append(update.contribution(weight))

    def apply(self, scale: float = 1.0) -> SumUp:
        """w ← w + scale · Σ a_i v_i, as soon as that is known; then start anew."""
        used, self.contributions = tuple(self.contributions), []
        return SumUp(used, scale)


class RobustSum:
    """A `WeightedSum` in which, for each coordinate, the extremes of the n updates do not count (Yin,
    Chen, Ramchandran, Bartlett 2018, arXiv 1803.01498, Definitions 1 and 2, with weights):

        Σ a_i v_i   becomes   A · Σ_{j=k+1}^{n−k} a_(j) v_(j) / Σ_{j=k+1}^{n−k} a_(j),   A = Σ a_i

    with v_(1) ≤ … ≤ v_(n) the values of the v_i in that coordinate, in order, and a_(j) their weights.
    k = ⌊βn⌋ is the β-trimmed mean, k = ⌈n/2⌉ − 1 the median, k = 0 the plain sum. As long as at most k
    of the updates are an attacker's, no coordinate of the mean leaves the range of the others' values,
    whatever the weights.

    The updates themselves are kept: n models' memory. The log has the weights of the plain sum.
    """

    def __init__(self, server: Server, trim: Trim) -> None:
        self._server = server
        self._trim = trim
        self._rows: list[Vector] = []
        """v_i, an update that counts several times as often."""
        self._weights: list[float] = []
        """a_i of each."""
        self.contributions: list[Contribution] = []

    def __len__(self) -> int:
        """How many updates are in it."""
        return len(self.contributions)

    @property
    def weight(self) -> float:
        """Σ a_i."""
        return sum(contribution.weight for contribution in self.contributions)

    def add(self, update: Update, weight: float = 1.0, *, times: int = 1) -> None:
        """As `WeightedSum.add`."""
        self._rows += [update.vector.astype(self._server.w.dtype)] * times
        self._weights += [weight] * times
        self.contributions.append(update.contribution(times * weight))

    def apply(self, scale: float = 1.0, *, sign: int = 1) -> Aggregated:
        """As `WeightedSum.apply`."""
        mean = trimmed_mean(self._rows, trimmed(len(self._rows), self._trim), self._weights)
        add_scaled(self._server.w, mean, sign * scale * self.weight)
        used, self.contributions, self._rows, self._weights = self.contributions, [], [], []
        return self._server.aggregated(used, scale)


class Workers:
    """The present clients where at most `concurrency` train at once (None: all of them).

    Each is training, waiting for the aggregation that it contributed to, or idle. Drawing an idle one
    takes the same time however many there are.
    """

    def __init__(self, server: Server, concurrency: int | None) -> None:
        self._server = server
        self._concurrency = concurrency
        self.training: dict[str, int] = {}
        """The version that each of them trains from."""
        self.waiting: set[str] = set()
        self._idle: list[str] = []
        self._position: dict[str, int] = {}
        """Of each idle client, in that list."""

    def add_idle(self, clients: Iterable[str]) -> None:
        for client in clients:
            if client not in self._position:
                self._position[client] = len(self._idle)
                self._idle.append(client)

    def discard(self, client: str) -> None:
        """`client` is gone."""
        self.training.pop(client, None)
        self.waiting.discard(client)
        if client in self._position:
            self._remove_idle(client)

    def release(self) -> None:
        """Those that wait become idle, in device order."""
        if self.waiting:
            self.add_idle(self._server.in_order(self.waiting))
            self.waiting.clear()

    def assign(self) -> list[str]:
        """Take the idle, as many as may train at once, drawn uniformly; they train from now on."""
        if self._concurrency is None:
            chosen, self._idle = self._idle, []
            self._position.clear()
        else:
            room = self._concurrency - len(self.training) - len(self.waiting)
            chosen = []
            for _ in range(min(room, len(self._idle))):
                chosen.append(self._idle[self._server.rng.integers(len(self._idle))])
                self._remove_idle(chosen[-1])
        self.training |= dict.fromkeys(chosen, self._server.version)
        return chosen

    def _remove_idle(self, client: str) -> None:
        """The last of the list takes its place."""
        position, last = self._position.pop(client), self._idle.pop()
        if last != client:
            self._idle[position] = last
            self._position[last] = position


def training_at_once(clients: int, concurrency: int | None) -> int:
    """How many of `clients` train at once. Raises ValueError where there are too few of them."""
    if concurrency is not None and concurrency > clients:
        raise ValueError(f"concurrency is {concurrency}, but there are only {clients} clients")
    return concurrency or clients


def check_update_times(times: Sequence[float] | None, clients: int | None = None) -> None:
    """Raise ValueError, unless they are above 0 s and, where `clients` is given, one per client."""
    if times is None:
        return
    if not all(time > 0 for time in times):
        raise ValueError("update_times must all be longer than 0 s")
    if clients is not None and len(times) != clients:
        raise ValueError(f"update_times has {len(times)} entries, expected {clients}: one per client")
