"""Random durations, in seconds. To add a distribution, write a dataclass here and add a line to
DISTRIBUTIONS.

All randomness comes from the generator that is passed in. `Annotated[float, "s"]` means that a topology
gives the parameter as a duration (`200ms`). A parameter of type `float` has no unit, or the unit that
its docstring states.
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
"""Up to this `sigma`, the mean and the drawn durations of a lognormal distribution are finite."""


class DurationDistribution(Protocol):
    """On [0, ∞). The constructor raises ValueError for invalid parameters."""

    @property
    def expectation(self) -> float:
        """Seconds; infinite if the distribution has no finite mean."""

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        """Seconds of the next duration at each call."""


@dataclass(frozen=True)
class Constant:
    """Always `value`."""

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
    """Uniform between `low` and `high`."""

    low: Seconds
    high: Seconds

    def __post_init__(self) -> None:
        at_least("low", self.low, 0)
        if self.high < self.low:
            raise ValueError(f"high is {self.high:g}, expected at least low ({self.low:g})")

    @property
    def expectation(self) -> float:
        return (self.low + self.high) / 2

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        return lambda: float(rng.uniform(self.low, self.high))


@dataclass(frozen=True)
class Normal:
    """Truncated normal: values below `low` are drawn again."""

    mean: Seconds
    """Mean before the truncation."""
    std: Seconds
    low: Seconds = 0.0

    def __post_init__(self) -> None:
        at_least("low", self.low, 0)
        at_least("std", self.std, 0)
        if not self.mean >= self.low:  # so that at least half of the draws are accepted
            raise ValueError(f"mean is {self.mean:g}, expected at least low ({self.low:g})")

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
    """Lognormal: exp of a normal variable with mean ln(`median`) and standard deviation `sigma`."""

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
    """Exponential (memoryless). Set either `mean` or `rate`."""

    mean: Seconds | None = None
    """Mean; None if `rate` is set."""
    rate: float | None = None
    """1 ÷ mean, per second; None if `mean` is set."""

    def __post_init__(self) -> None:
        if (self.mean is None) == (self.rate is None):
            raise ValueError("set either mean or rate (1 ÷ mean)")
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
    """Pareto (heavy-tailed): P(duration > x) = (`scale`/x)^`shape` for x ≥ `scale`. If shape ≤ 1, the
    mean is infinite."""

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
class DurationTrace:
    """Measured durations, replayed in order. After the last duration, the replay continues with the
    first one."""

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


DISTRIBUTIONS: dict[str, type[DurationDistribution]] = {
    "constant": Constant,
    "exponential": Exponential,
    "lognormal": Lognormal,
    "normal": Normal,
    "pareto": Pareto,
    "trace": DurationTrace,
    "uniform": Uniform,
}


def vary(duration: DrawnDuration | None) -> bool:
    return duration is not None and duration.distribution != "constant"


def sampler(duration: DrawnDuration, rng: np.random.Generator) -> Callable[[], float]:
    """Seconds, at least 0, at each call. Raises ValueError for an unknown distribution, TypeError or
    ValueError for invalid parameters."""
    distribution = DISTRIBUTIONS.get(duration.distribution)
    if distribution is None:
        raise ValueError(
            f"unknown distribution {duration.distribution!r}, expected one of {', '.join(DISTRIBUTIONS)}"
        )
    return distribution(**duration.params).sampler(rng)
