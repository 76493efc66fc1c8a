"""AREA's criteria, step sizes and parameters. Numbers computed by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from agents.rules.area import Area, theorem7
from agents.rules.interface import Aggregated, Send, SetPeriodicTimer, SetTimer
from agents.timing.nanoseconds import SECOND, to_seconds
from tests.agents.helpers import make_server, update, weights


def step_sizes(actions: Iterable[Any]) -> list[float | None]:
    return [action.lr for action in actions if isinstance(action, Send)]


def test_k_counts_messages_and_aggregations() -> None:
    server = make_server(0.5, 0.5)
    state = Area(every=2, step="harmonic", c=6, d=2).begin(server)
    assert step_sizes(state.start()) == [3.0, 3.0]  # α_0
    assert step_sizes(state.update(update("a", 1.0, kind="model"))) == [2.0]  # α_1
    assert step_sizes(state.update(update("b", 1.0, kind="model"))) == [1.5]  # α_2
    state.timer("aggregate")  # k = 3
    assert step_sizes(state.update(update("a", 1.0, kind="residual"))) == [1.0]  # α_4
    assert step_sizes(state.join("b")) == [1.0]
    assert Area(every=1, lr=0.25).step_size(7) == 0.25


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # γ = 1, 𝒟 = 2/(1·2) = 1: α_k = 1/(0.25·1·1·k/48 + 1)
        ({"k": 0, "mu": 1, "smoothness": 1, "local_steps": 1, "pi_min": 0.25}, 1.0),
        ({"k": 48, "mu": 1, "smoothness": 1, "local_steps": 1, "pi_min": 0.25}, 0.8),
        # γ = 1.5, 𝒟 = min{1/6, 1/12, √(3·2.25/(64·81·8)) = 1/78.3837, ∛(1.5/(32·81·8)) = 1/24.0}
        ({"k": 0, "mu": 1, "smoothness": 3, "local_steps": 3, "pi_min": 0.1}, 0.01275776),
        # 1/(0.1·3·1.5·100/48 + 78.3837) = 1/79.3212
        ({"k": 100, "mu": 1, "smoothness": 3, "local_steps": 3, "pi_min": 0.1}, 0.01260697),
    ],
)
def test_step_size_follows_theorem_7(arguments: dict[str, Any], expected: float) -> None:
    assert theorem7(**arguments) == pytest.approx(expected, rel=1e-6)
    k = arguments.pop("k")
    assert Area(every=1, step="theorem7", **arguments).step_size(k) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("steps", [2, 3, 50])
@pytest.mark.parametrize(("mu", "smoothness"), [(1, 1), (0.01, 0.02), (1, 300), (40, 50)])
def test_first_step_of_theorem_7_is_the_minimum_of_four_bounds(
    mu: float, smoothness: float, steps: int
) -> None:
    gamma = 2 * mu * smoothness / (mu + smoothness)
    four = (
        2 / (steps * (mu + smoothness)),
        gamma / (smoothness**2 * (steps - 1)),
        math.sqrt(steps * gamma**2 / (2 * 32 * smoothness**4 * (steps - 1) ** 3)),
        math.cbrt(gamma / (32 * smoothness**4 * (steps - 1) ** 3)),
    )
    assert theorem7(0, mu, smoothness, steps, 0.1) == pytest.approx(min(four), rel=1e-12)


def test_period_without_messages_is_counted_but_makes_no_version() -> None:
    server = make_server(1.0)
    state = Area(criterion="period", period=2.0, step="harmonic", c=1, d=1).begin(server)
    assert state.start() == [Send("a", lr=1.0), SetPeriodicTimer("aggregate", 2 * SECOND)]
    assert state.timer("aggregate") == [Aggregated(0, ())]
    assert state.update(update("a", 3.0, kind="model")) == [Send("a", lr=1 / 3)]
    assert weights(state.timer("aggregate")) == [("a", 1.0)]
    assert (server.w.tolist(), server.version) == ([3.0], 1)


@pytest.mark.parametrize(
    ("tuned", "rate"),
    [(False, 4.0), (True, 1.0)],  # λ = 2 and 1/2: √(2.5 / ((2/2)·2.5)) = 1
)
def test_random_intervals_follow_the_rate_or_the_tuned_rate(tuned: bool, rate: float) -> None:
    state = Area(criterion="random", rate=4.0, tuned=tuned).begin(make_server(0.5, 0.5))
    state.start()

    def mean_interval() -> float:
        timers = [state.timer("aggregate")[-1] for _ in range(2000)]
        return float(
            np.mean([to_seconds(timer.after) for timer in timers if isinstance(timer, SetTimer)])
        )

    state.update(update("a", 0.0, kind="model", round_trip=0.25))
    state.update(update("a", 0.0, kind="residual", round_trip=0.75))
    assert mean_interval() == pytest.approx(1 / 4, rel=0.1)  # b has not been seen
    state.update(update("b", 0.0, kind="model", round_trip=2.0))
    assert mean_interval() == pytest.approx(1 / rate, rel=0.1)


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({}, "criterion: every needs `every`"),
        ({"every": 0}, "every is 0"),
        ({"every": 2, "period": 1.0}, "period needs criterion: period"),
        ({"every": 2, "tuned": True}, "tuned needs criterion: random"),
        ({"every": 2, "server_lr": 1.5}, "server_lr is 1.5"),
        ({"every": 2, "server_lr": 0.0}, "server_lr is 0"),
        ({"every": 2, "lr": -1.0}, "lr is -1"),
        ({"every": 2, "lr": 1.0, "step": "harmonic", "c": 1, "d": 1}, "lr needs step: constant"),
        ({"every": 2, "step": "harmonic", "c": 1}, "step: harmonic needs `d`"),
        ({"every": 2, "mu": 1.0}, "mu needs step: theorem7"),
        ({"criterion": "random", "rate": float("nan")}, "rate is nan"),
    ],
)
def test_invalid_parameters_are_refused(parameters: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Area(**parameters)


@pytest.mark.parametrize(("name", "value"), [("mu", 4.0), ("pi_min", 0.6), ("local_steps", 0)])
def test_invalid_constants_of_theorem_7_are_refused(name: str, value: float) -> None:
    fitting: dict[str, Any] = {"mu": 1.0, "smoothness": 3.0, "local_steps": 1, "pi_min": 0.1}
    with pytest.raises(ValueError, match=f"{name} is"):
        Area(every=1, step="theorem7", **{**fitting, name: value})
