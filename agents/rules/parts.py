"""Building blocks of rules: plain and robust sums of updates, a pool that limits the number of clients
that train at the same time, and checks of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from agents.models.vectors import Vector, add_and_clear, add_scaled, mix, trimmed_mean
from agents.rules.interface import Aggregated, Contribution, Server, SumUp, Update

Trim = float | Literal["median"]
"""Share of the updates whose values are removed at each end of every coordinate: the lowest and the
highest values. From 0 to below 0.5. `median`: only the middle one or two values are left."""


def make_sum(server: Server, trim: Trim) -> WeightedSum:
    """Return an empty sum for the updates of the next version: a `RobustSum` if `trim` is set, otherwise
    a `WeightedSum`."""
    return RobustSum(server, trim) if trim else WeightedSum(server)


def check_trim(trim: Trim, updates: int | None = None) -> None:
    """Raise ValueError if `trim` is neither `median` nor in [0, 0.5), or if `trim` is set but removes
    nothing when `updates` updates are aggregated. `updates`: number of updates per aggregation; None if
    this number varies."""
    if trim != "median" and not 0 <= trim < 0.5:
        raise ValueError(f"trim is {trim:g}, expected from 0 to below 0.5, or median")
    if not trim or updates is None or count_trimmed(updates, trim):
        return
    if updates < 3:
        raise ValueError(f"trim needs at least 3 updates per aggregation, but there are {updates}")
    least = math.ceil(100 / updates) / 100
    raise ValueError(
        f"trim {trim} removes nothing when only {updates} updates are aggregated: use at least {least:g}"
    )


def count_trimmed(updates: int, trim: Trim) -> int:
    """Return the number of values that are removed at each end of a coordinate with `updates` values. At
    least one value remains."""
    most = (updates - 1) // 2
    return most if trim == "median" else min(most, int(trim * updates + 1e-9))


class WeightedSum:
    """Running sum Σ a_i v_i of the updates for the next version. The single updates are not kept."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.vector = np.zeros_like(server.w)
        self.contributions: list[Contribution] = []
        """The updates in the sum, each with its weight a_i."""

    def __len__(self) -> int:
        """Number of updates in the sum."""
        return len(self.contributions)

    @property
    def weight(self) -> float:
        """Total weight Σ a_i of the updates in the sum."""
        return sum(contribution.weight for contribution in self.contributions)

    def add(self, update: Update, weight: float = 1.0, *, times: int = 1) -> None:
        """Add `update` `times` times, each time with the weight a = `weight`."""
        weight *= times
        add_scaled(self.vector, update.vector, weight)
        self.contributions.append(update.contribution(weight))

    def apply(self, scale: float = 1.0, *, sign: int = 1) -> Aggregated:
        """Do w ← w + sign · scale · Σ a_i v_i, and empty the sum. Return the entry for the log, in which
        update i has the weight scale · a_i."""
        self._move(sign * scale)
        used, self.contributions = self.contributions, []
        return self._server.aggregated(used, scale)

    def _move(self, scale: float) -> None:
        """Add the sum, times `scale`, to w, and set the sum to zero."""
        add_and_clear(self._server.w, self.vector, scale)


class SumOfModels(WeightedSum):
    """A `WeightedSum` for updates that were all trained from the current w. An update may arrive as Δ_i
    or as the trained model w_i (`ClientSide.as_model`):

        w ← w + s·Σ a_i Δ_i   equals   w ← (1 − s·A) w + s·A·m,   A = Σ a_i,   m = Σ a_i w_i / A

    m is kept as a running mean. For one model, or several equal models, m is exactly that model. If s·A
    = 1, the new w is exactly m, too. Updates that arrive as Δ_i are summed separately.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.vector = self._mean = np.zeros(0, server.w.dtype)  # allocated on first use
        self._total = 0.0
        """A = Σ a_i over the updates that arrived as models."""

    def add(self, update: Update, weight: float = 1.0, *, times: int = 1) -> None:
        """Add `update` `times` times, each time with the weight a = `weight`."""
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
    """A `WeightedSum` for a server that learns only sums. It cannot read the updates, so only their
    weights are kept. Each weight is at most 1."""

    def __init__(self) -> None:
        self.contributions: list[Contribution] = []

    def __len__(self) -> int:
        return len(self.contributions)

    def add(self, update: Update, weight: float = 1.0) -> None:
        """Add `update` with a = `weight`. Its vector is not read."""
        self.contributions.append(update.contribution(weight))

    def apply(self, scale: float = 1.0) -> SumUp:
        """Empty this sum. Return the request to do w ← w + scale · Σ a_i v_i when Σ a_i v_i is
        known."""
        used, self.contributions = tuple(self.contributions), []
        return SumUp(used, scale)


class RobustSum(WeightedSum):
    """A `WeightedSum` that removes the extreme values of the n updates in each coordinate (Yin, Chen,
    Ramchandran, Bartlett 2018, arXiv 1803.01498, Definitions 1 and 2, with weights):

        Σ a_i v_i   becomes   A · Σ_{j=k+1}^{n−k} a_(j) v_(j) / Σ_{j=k+1}^{n−k} a_(j),   A = Σ a_i

    Here v_(1) ≤ … ≤ v_(n) are the sorted values of the v_i in that coordinate, and a_(j) are their
    weights. k = ⌊βn⌋ gives the β-trimmed mean, k = ⌈n/2⌉ − 1 the median, and k = 0 the plain sum. If at
    most k of the updates come from attackers, every coordinate of the mean stays within the range of the
    honest values, regardless of the weights.

    All n updates are kept until the aggregation, which requires memory for n models. The log has the
    weights of the plain sum.
    """

    def __init__(self, server: Server, trim: Trim) -> None:
        super().__init__(server)
        self._trim = trim
        self._rows: list[Vector] = []
        """Vectors v_i. An update that counts m times has m rows."""
        self._weights: list[float] = []
        """Weights a_i of the rows."""

    def add(self, update: Update, weight: float = 1.0, *, times: int = 1) -> None:
        """Add `update` `times` times, each time with the weight a = `weight`."""
        self._rows += [update.vector.astype(self._server.w.dtype)] * times
        self._weights += [weight] * times
        self.contributions.append(update.contribution(times * weight))

    def _move(self, scale: float) -> None:
        """w ← w + scale · A · mean, where `mean` is the trimmed mean and A = Σ a_i."""
        mean = trimmed_mean(self._rows, count_trimmed(len(self._rows), self._trim), self._weights)
        add_scaled(self._server.w, mean, scale * self.weight)
        self._rows, self._weights = [], []


class ClientPool:
    """The present clients. At most `concurrency` of them train or wait for an aggregation at the same
    time. If `concurrency` is None, there is no limit.

    A client is in one of three states: training, waiting for the aggregation of its update, or idle.
    Drawing an idle client takes constant time if the rule draws by itself.
    """

    def __init__(self, server: Server, concurrency: int | None) -> None:
        self._server = server
        self._concurrency = concurrency
        self.training: dict[str, int] = {}
        """Clients that train, each with the version of the model that it trains from."""
        self.waiting: set[str] = set()
        """Clients that wait for the aggregation of their updates."""
        self._idle: list[str] = []
        self._position: dict[str, int] = {}
        """Index of each idle client in `_idle`."""

    def add_idle(self, clients: Iterable[str]) -> None:
        """Make `clients` idle."""
        for client in clients:
            if client not in self._position:
                self._position[client] = len(self._idle)
                self._idle.append(client)

    def discard(self, client: str) -> None:
        """Remove `client`, which has left."""
        self.training.pop(client, None)
        self.waiting.discard(client)
        if client in self._position:
            self._remove_idle(client)

    def release(self) -> None:
        """Make all waiting clients idle, in device order."""
        if self.waiting:
            self.add_idle(self._server.in_device_order(self.waiting))
            self.waiting.clear()

    def assign(self) -> list[str]:
        """Draw idle clients, uniformly or as the topology says, until as many clients train as
        may train. Without a limit, take all idle clients. Mark the drawn clients as training, and return
        them in the order of the draws."""
        if self._concurrency is None:
            chosen, self._idle = self._idle, []
            self._position.clear()
        else:
            room = self._concurrency - len(self.training) - len(self.waiting)
            wanted = min(room, len(self._idle))
            chosen = []
            if self._server.draws is None:
                for _ in range(wanted):
                    chosen.append(self._idle[self._server.rng.integers(len(self._idle))])
                    self._remove_idle(chosen[-1])
            elif wanted > 0:
                chosen = self._server.draw(self._idle, wanted, partial(self._drawn, wanted))
                for client in chosen:
                    self._remove_idle(client)
        self.training |= dict.fromkeys(chosen, self._server.version)
        return chosen

    def _drawn(self, count: int, rng: np.random.Generator) -> list[str]:
        """Return the `count` idle clients that `assign` would draw by itself. They stay idle."""
        idle, drawn = [*self._idle], []
        for _ in range(count):
            position = int(rng.integers(len(idle)))
            drawn.append(idle[position])
            last = idle.pop()
            if position < len(idle):
                idle[position] = last
        return drawn

    def _remove_idle(self, client: str) -> None:
        """Remove `client` from the list of idle clients. The last client of the list moves to the
        index of `client`."""
        position, last = self._position.pop(client), self._idle.pop()
        if last != client:
            self._idle[position] = last
            self._position[last] = position


def training_at_once(clients: int, concurrency: int | None) -> int:
    """Return how many of `clients` clients train at the same time. Raise ValueError if `concurrency` is
    more than `clients`."""
    if concurrency is not None and concurrency > clients:
        raise ValueError(f"concurrency is {concurrency}, but there are only {clients} clients")
    return concurrency or clients


def check_update_times(times: Sequence[float] | None, clients: int | None = None) -> None:
    """Raise ValueError if a time in `times` is not above 0 s, or if the number of times is not
    `clients`. If `clients` is None, the number is not checked."""
    if times is None:
        return
    if not all(time > 0 for time in times):
        raise ValueError("all values of update_times must be above 0 s")
    if clients is not None and len(times) != clients:
        raise ValueError(f"update_times has {len(times)} entries, expected {clients}: one per client")
