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
from statistics import NormalDist, fmean
from typing import Annotated, Protocol

import numpy as np

from agents.checks import at_least, positive
from agents.config import DrawnDuration

Seconds = Annotated[float, "s"]
_MAX_SIGMA = 30.0
"""Of a lognormal distribution: its mean, and all that is drawn of it, are numbers then."""


class Distribution(Protocol):
    """The parameters of a distribution on [0, ∞); its constructor raises ValueError for unfit ones."""

    @property
    def expectation(self) -> float:
        """Their mean, in seconds; infinite where the tail is too heavy for one."""

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        """What gives the next duration, in seconds, at each call."""


@dataclass(frozen=True)
class Constant:
    """Always the same."""

    value: Seconds

    def __post_init__(self) -> None:
        at_least("value", self.value, 0)

    @property
    def expectation(self) -> float:
        return self.value

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        return lambda: self.value


@dataclass(frozen=True)
class Uniform:
    """Every value between `low` and `high` is equally likely."""

    low: Seconds
    high: Seconds

    def __post_init__(self) -> None:
        at_least("low", self.low, 0)
        if self.high < self.low:
            raise ValueError(f"high is {self.high:g}, expected at least low, {self.low:g}")

    @property
    def expectation(self) -> float:
        return (self.low + self.high) / 2

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
        at_least("low", self.low, 0)
        at_least("std", self.std, 0)
        if not self.mean >= self.low:  # so at least every second draw is kept
            raise ValueError(f"mean is {self.mean:g}, expected at least low, {self.low:g}")

    @property
    def expectation(self) -> float:
        if self.std == 0:
            return self.mean
        normal = NormalDist(self.mean, self.std)
        return self.mean + self.std**2 * normal.pdf(self.low) / (1 - normal.cdf(self.low))

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
        positive("median", self.median)
        at_least("sigma", self.sigma, 0)
        if self.sigma > _MAX_SIGMA:
            raise ValueError(f"sigma is {self.sigma:g}, expected at most {_MAX_SIGMA:g}")

    @property
    def expectation(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)

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
            raise ValueError("give one of mean and rate, which is 1 ÷ mean")
        positive("mean", self.mean)
        positive("rate", self.rate)

    @property
    def expectation(self) -> float:
        return self.mean if self.mean is not None else 1 / (self.rate or math.inf)

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        mean = self.expectation
        return lambda: float(rng.exponential(mean))


@dataclass(frozen=True)
class Pareto:
    """Heavy tail: P(duration > x) = (`scale`/x)^`shape` for x ≥ `scale`. No finite mean if shape ≤ 1."""

    scale: Seconds
    """The shortest duration."""
    shape: float

    def __post_init__(self) -> None:
        positive("scale", self.scale)
        positive("shape", self.shape)

    @property
    def expectation(self) -> float:
        return self.scale * self.shape / (self.shape - 1) if self.shape > 1 else math.inf

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
            at_least("values", value, 0)

    @property
    def expectation(self) -> float:
        return fmean(self.values)

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


def vary(duration: DrawnDuration | None) -> bool:
    """Whether one such duration may differ from the next."""
    return duration is not None and duration.distribution != "constant"


def sampler(duration: DrawnDuration, rng: np.random.Generator) -> Callable[[], float]:
    """What gives the next such duration, in seconds, zero or more, at each call.

    Raises ValueError for an unknown distribution, TypeError or ValueError for unfit parameters.
    """
    distribution = DISTRIBUTIONS.get(duration.distribution)
    if distribution is None:
        raise ValueError(
            f"{duration.distribution!r} is no distribution, expected one of {', '.join(DISTRIBUTIONS)}"
        )
    return distribution(**duration.params).sampler(rng)
