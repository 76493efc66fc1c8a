"""Random durations, in seconds. To add one: a dataclass here, and a line in DISTRIBUTIONS.

Pure: randomness comes from the generator that is passed in. `Annotated[float, "s"]` says that a
topology writes the parameter as a duration (`200ms`); a plain float has no unit, or the one its
docstring names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np

from agents.config import Duration

Seconds = Annotated[float, "s"]


class Distribution(Protocol):
    """The parameters of a distribution on [0, ∞); its constructor raises ValueError for unfit ones."""

    def draw(self, rng: np.random.Generator) -> float:
        """One duration in seconds."""


@dataclass(frozen=True)
class Constant:
    """Always the same."""

    value: Seconds

    def __post_init__(self) -> None:
        _at_least_zero("value", self.value)

    def draw(self, rng: np.random.Generator) -> float:
        return self.value


@dataclass(frozen=True)
class Uniform:
    """Every duration between `low` and `high` is equally likely."""

    low: Seconds
    high: Seconds

    def __post_init__(self) -> None:
        _at_least_zero("low", self.low)
        if self.high < self.low:
            raise ValueError(f"high is {self.high:g} s, expected at least low, {self.low:g} s")

    def draw(self, rng: np.random.Generator) -> float:
        return float(rng.uniform(self.low, self.high))


@dataclass(frozen=True)
class Normal:
    """Normal, truncated at zero: what would be below zero is drawn again."""

    mean: Seconds
    """Before the truncation."""
    std: Seconds

    def __post_init__(self) -> None:
        _at_least_zero("mean", self.mean)  # so at least every second draw is kept
        _at_least_zero("std", self.std)

    def draw(self, rng: np.random.Generator) -> float:
        while (value := float(rng.normal(self.mean, self.std))) < 0:
            pass
        return value


@dataclass(frozen=True)
class Lognormal:
    """exp of a normal with mean ln(`median`) and standard deviation `sigma`."""

    median: Seconds
    sigma: float

    def __post_init__(self) -> None:
        _above_zero("median", self.median)
        _at_least_zero("sigma", self.sigma)

    def draw(self, rng: np.random.Generator) -> float:
        return float(rng.lognormal(math.log(self.median), self.sigma))


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

    def draw(self, rng: np.random.Generator) -> float:
        mean = self.mean if self.mean is not None else 1 / (self.rate or math.inf)
        return float(rng.exponential(mean))


@dataclass(frozen=True)
class Pareto:
    """Heavy tail: P(duration > x) = (`scale`/x)^`shape` for x ≥ `scale`. No finite mean if shape ≤ 1."""

    scale: Seconds
    """The shortest duration."""
    shape: float

    def __post_init__(self) -> None:
        _above_zero("scale", self.scale)
        _above_zero("shape", self.shape)

    def draw(self, rng: np.random.Generator) -> float:
        return self.scale * (1 + float(rng.pareto(self.shape)))


@dataclass(frozen=True)
class Trace:
    """Measured durations; each draw takes one of them, all equally likely, independently."""

    values: tuple[Seconds, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values is empty, expected at least one duration")
        for value in self.values:
            _at_least_zero("values", value)

    def draw(self, rng: np.random.Generator) -> float:
        return float(self.values[rng.integers(len(self.values))])


DISTRIBUTIONS: dict[str, type[Distribution]] = {
    "constant": Constant,
    "exponential": Exponential,
    "lognormal": Lognormal,
    "normal": Normal,
    "pareto": Pareto,
    "trace": Trace,
    "uniform": Uniform,
}


def draw(duration: Duration, rng: np.random.Generator) -> float:
    """One duration in seconds, zero or more.

    Raises ValueError for an unknown distribution, TypeError or ValueError for unfit parameters.
    """
    distribution = DISTRIBUTIONS.get(duration.distribution)
    if distribution is None:
        raise ValueError(
            f"{duration.distribution!r} is no distribution, expected one of {', '.join(DISTRIBUTIONS)}"
        )
    return distribution(**duration.params).draw(rng)


def _at_least_zero(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name} is {value:g}, expected at least 0")


def _above_zero(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} is {value:g}, expected above 0")
