"""Random durations, in seconds. To add one: a dataclass here, and a line in DISTRIBUTIONS.

Pure: randomness comes from the generator that is passed in. `Annotated[float, "s"]` says that a
topology writes the parameter as a duration (`200ms`); a plain float has no unit, or the one its
docstring names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np

from agents.config import Duration

Seconds = Annotated[float, "s"]


class Distribution(Protocol):
    """The parameters of a distribution on [0, ∞); its constructor raises ValueError for unfit ones."""

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        """What gives the next duration, in seconds, at each call."""


@dataclass(frozen=True)
class Constant:
    """Always the same."""

    value: Seconds

    def __post_init__(self) -> None:
        _at_least_zero("value", self.value)

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        return lambda: self.value


@dataclass(frozen=True)
class Uniform:
    """Every duration between `low` and `high` is equally likely."""

    low: Seconds
    high: Seconds

    def __post_init__(self) -> None:
        _at_least_zero("low", self.low)
        if self.high < self.low:
            raise ValueError(f"high is {self.high:g} s, expected at least low, {self.low:g} s")

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        return lambda: float(rng.uniform(self.low, self.high))


@dataclass(frozen=True)
class Normal:
    """Normal, truncated: what would be below `low` is drawn again."""

    mean: Seconds
    """Before the truncation."""
    std: Seconds
    low: Seconds = 0.0

    def __post_init__(self) -> None:
        _at_least_zero("low", self.low)
        _at_least_zero("std", self.std)
        if not self.mean >= self.low:  # so at least every second draw is kept
            raise ValueError(f"mean is {self.mean:g} s, expected at least low, {self.low:g} s")

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        def sample() -> float:
            while (value := float(rng.normal(self.mean, self.std))) < self.low:
                pass
            return value

        return sample


@dataclass(frozen=True)
class Lognormal:
    """exp of a normal with mean ln(`median`) and standard deviation `sigma`."""

    median: Seconds
    sigma: float

    def __post_init__(self) -> None:
        _above_zero("median", self.median)
        _at_least_zero("sigma", self.sigma)

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        return lambda: float(rng.lognormal(math.log(self.median), self.sigma))


@dataclass(frozen=True)
class Exponential:
    """Memoryless; give one of `mean` and `rate`."""

    mean: Seconds | None = None
    rate: float | None = None
    """Per second: 1 ÷ mean."""

    def __post_init__(self) -> None:
        if (self.mean is None) == (self.rate is None):
            raise ValueError("give one of mean (such as 200ms) and rate (per second)")
        if self.mean is not None:
            _above_zero("mean", self.mean)
        if self.rate is not None:
            _above_zero("rate", self.rate)

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        mean = self.mean if self.mean is not None else 1 / (self.rate or math.inf)
        return lambda: float(rng.exponential(mean))


@dataclass(frozen=True)
class Pareto:
    """Heavy tail: P(duration > x) = (`scale`/x)^`shape` for x ≥ `scale`. No finite mean if shape ≤ 1."""

    scale: Seconds
    """The shortest duration."""
    shape: float

    def __post_init__(self) -> None:
        _above_zero("scale", self.scale)
        _above_zero("shape", self.shape)

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        return lambda: self.scale * (1 + float(rng.pareto(self.shape)))


@dataclass(frozen=True)
class Trace:
    """Measured durations, replayed in their order, from the first one again when they are used up."""

    values: tuple[Seconds, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values is empty, expected at least one duration")
        for value in self.values:
            _at_least_zero("values", value)

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        return itertools.cycle(self.values).__next__


DISTRIBUTIONS: dict[str, type[Distribution]] = {
    "constant": Constant,
    "exponential": Exponential,
    "lognormal": Lognormal,
    "normal": Normal,
    "pareto": Pareto,
    "trace": Trace,
    "uniform": Uniform,
}


def sampler(duration: Duration, rng: np.random.Generator) -> Callable[[], float]:
    """What gives the next such duration, in seconds, zero or more, at each call.

    Raises ValueError for an unknown distribution, TypeError or ValueError for unfit parameters.
    """
    distribution = DISTRIBUTIONS.get(duration.distribution)
    if distribution is None:
        raise ValueError(
            f"{duration.distribution!r} is no distribution, expected one of {', '.join(DISTRIBUTIONS)}"
        )
    return distribution(**duration.params).sampler(rng)


def _at_least_zero(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name} is {value:g}, expected at least 0")


def _above_zero(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} is {value:g}, expected above 0")
