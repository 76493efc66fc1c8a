from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from agents.config import DrawnDuration
from agents.timing.durations import sampler, vary

N = 20_000


def draws(distribution: str, **params: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    sample = sampler(DrawnDuration(distribution, params), np.random.default_rng(1))
    return np.array([sample() for _ in range(N)])


@pytest.mark.parametrize(
    ("distribution", "params", "median"),
    [
        ("constant", {"value": 0.2}, 0.2),
        ("uniform", {"low": 1, "high": 3}, 2),
        ("normal", {"mean": 2, "std": 0.1}, 2),
        ("lognormal", {"median": 0.5, "sigma": 1}, 0.5),
        ("exponential", {"mean": 2}, 2 * math.log(2)),
        ("exponential", {"rate": 4}, math.log(2) / 4),
        ("pareto", {"scale": 3, "shape": 2}, 3 * math.sqrt(2)),
        ("trace", {"values": [1, 2, 7]}, 2),
    ],
)
def test_medians_match_the_distributions(
    distribution: str, params: dict[str, Any], median: float
) -> None:
    drawn = draws(distribution, **params)
    assert np.median(drawn) == pytest.approx(median, rel=0.05)
    assert drawn.min() >= 0


def test_normal_is_truncated_at_zero() -> None:
    drawn = draws("normal", mean=0, std=1)
    assert drawn.min() > 0
    assert drawn.mean() == pytest.approx(math.sqrt(2 / math.pi), rel=0.03)  # of the half-normal


def test_durations_stay_within_their_bounds() -> None:
    assert draws("pareto", scale=3, shape=2).min() >= 3
    assert draws("normal", mean=2, std=1, low=1.5).min() >= 1.5


def test_trace_is_replayed_in_order() -> None:
    assert draws("trace", values=(1.0, 0.02, 3.0))[:7].tolist() == [1, 0.02, 3, 1, 0.02, 3, 1]


@pytest.mark.parametrize(
    ("distribution", "params"),
    [
        ("constant", {"value": -1}),
        ("uniform", {"low": 2, "high": 1}),
        ("normal", {"mean": -1, "std": 1}),
        ("normal", {"mean": 1, "std": 1, "low": 2}),
        ("lognormal", {"median": 0, "sigma": 1}),
        ("lognormal", {"median": 1, "sigma": 38}),
        ("exponential", {}),
        ("exponential", {"mean": 1, "rate": 1}),
        ("exponential", {"rate": 0}),
        ("pareto", {"scale": 1, "shape": 0}),
        ("trace", {"values": ()}),
        ("weibull", {}),
    ],
)
def test_invalid_parameters_are_refused(distribution: str, params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|set either"):
        sampler(DrawnDuration(distribution, params), np.random.default_rng())


def test_only_constant_durations_do_not_vary() -> None:
    assert vary(DrawnDuration("exponential", {"mean": 2}))
    assert vary(DrawnDuration("trace", {"values": [1, 2, 7]}))
    assert not vary(DrawnDuration("constant", {"value": 2}))
    assert not vary(None)
