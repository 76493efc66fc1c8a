"""The time model: steps, floors, and what TCP makes of a link."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agents.client.factory import Timing
from agents.config import DrawnDuration, LocalTraining
from agents.timing.nanoseconds import to_seconds
from testbed.plan import PlannedDevice, costs
from testbed.plan.costs import StepCost, StepTime, goodput
from testbed.topology import Virtual
from testbed.virtual.timing import ComputeTimes, latency


def _device(**fields: Any) -> PlannedDevice:
    plain: dict[str, Any] = {"cpu": None, "memory": 0, "local": LocalTraining(steps=1)}
    return PlannedDevice(name="a", group="a", **(plain | fields))


def _constant(seconds: float) -> DrawnDuration:
    return DrawnDuration("constant", {"value": seconds})


@pytest.mark.parametrize(
    ("device", "seconds"),
    [
        (_device(gflops=10.0), 0.5),  # 50 × 0.1e9 operations
        (_device(gflops=10.0, speed=2.0), 0.25),
        (_device(cpu=0.25), 0.4),  # 50 × 2 ms on a quarter of a core
        (_device(timing=_constant(3.0)), 3.0),
        (_device(timing=_constant(3.0), speed=2.0), 1.5),
        (_device(cpu=0.25, timing=_constant(3.0)), 3.0),  # a floor
        (_device(cpu=0.25, timing=_constant(0.1)), 0.4),
    ],
)
def test_time_of_fifty_steps(device: PlannedDevice, seconds: float) -> None:
    cost = StepCost(flops=0.1e9, time=StepTime(0.002))
    timing = Timing(device.timing, None, np.random.default_rng, speed=device.speed)
    timing.begin()
    computing = ComputeTimes(device, cost).computing(50)
    assert to_seconds(max(computing, timing.floor)) == pytest.approx(seconds)


def test_cost_of_a_step_rises_with_smaller_shares() -> None:
    time = StepTime(0.002, 0.0032)
    found = [time.at(share) for share in (2.0, 1.0, 0.5, 0.25, 0.125, 1 / 64)]
    assert found == pytest.approx([0.002, 0.002, 0.0024, 0.0028, 0.0032, 0.0044])
    speed = ComputeTimes(_device(cpu=0.25), StepCost(time=time))
    assert to_seconds(speed.computing(50)) == pytest.approx(50 * 0.0028 / 0.25)


def test_update_overhead_is_added_to_the_steps() -> None:
    cost = StepCost(flops=1e9, time=StepTime(0.002), update=0.003)
    of_a_share = ComputeTimes(_device(cpu=0.25), cost)
    assert to_seconds(of_a_share.computing(50)) == pytest.approx(0.412)
    of_its_own = ComputeTimes(_device(gflops=1.0), cost)
    assert to_seconds(of_its_own.computing(1)) == 1.0


def test_start_time_does_not_depend_on_the_share() -> None:
    cost = StepCost(flops=1e9, time=StepTime(0.002), start=1.5)
    speed = ComputeTimes(_device(cpu=0.25), cost)
    assert to_seconds(speed.starting()) == 1.5
    speed.set_share(0.5)
    assert to_seconds(speed.starting()) == 1.5
    of_its_own = ComputeTimes(_device(gflops=1.0), cost)
    assert of_its_own.starting() == 0


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, 0.003),
        ({"step_time": "1ms"}, 0.0),
        ({"step_time": "1ms", "update_time": "5ms"}, 0.005),
        ({"update_time": "0s"}, 0.0),
    ],
)
def test_default_update_cost_applies_without_times_in_the_topology(
    given: dict[str, str], seconds: float
) -> None:
    assert costs.step_cost(Virtual.model_validate(given), None).update == seconds


def test_smaller_share_prolongs_all_steps() -> None:
    speed = ComputeTimes(_device(cpu=0.5), StepCost(time=StepTime(0.002)))
    assert speed.set_share(0.125) == 4
    assert to_seconds(speed.computing(50)) == pytest.approx(0.8)


def test_unknown_durations_are_zero_at_any_share() -> None:
    speed = ComputeTimes(_device(cpu=0.5), StepCost())
    assert speed.computing(50) == 0
    assert speed.set_share(0.25) == 1


@pytest.mark.parametrize(
    ("link", "bits_per_second"),
    [
        ((None, 0.04, 0.0), None),
        ((20e6, 0.04, 0.0), 20e6),
        # W = √(1.5/0.06) = 5, √(3·0.06/8) = 0.15: 11,584 bits in 0.04/5 + 0.24·0.45·0.06·1.1152 s
        ((None, 0.04, 0.06), 0.94 * 11_584 / (0.008 + 0.007_226_496)),
        ((20e6, 0.04, 0.06), 0.94 * 11_584 / (0.008 + 0.007_226_496)),
        # √(3·0.96/8) = 0.6: a time-out for each loss, and no more. W = √(1.5/0.96) = 1.25.
        ((None, 1.0, 0.96), 0.04 * 11_584 / (0.8 + 1.2 * 0.96 * 30.4912)),
        # CUBIC's own window: 1.054 · 625^¾ = 131.75; √(3·0.0016/8) = 0.024_494_897.
        (
            (None, 1.0, 0.0016),
            0.9984 * 11_584 / (1 / 131.75 + 1.2 * 3 * 0.024_494_897 * 0.0016 * 1.000_081_92),
        ),
        # The link is slower than what loss allows, and what is lost is sent again.
        ((100e3, 0.04, 0.06), 94e3),
        ((100e3, 0.0, 0.06), 94e3),
        ((100e3, 0.04, 1.0), 0),
        ((None, 0.0, 1.0), 0),
    ],
)
def test_tcp_throughput_of_a_link(
    link: tuple[float | None, float, float], bits_per_second: float | None
) -> None:
    assert goodput(*link) == (None if bits_per_second is None else pytest.approx(bits_per_second))


def test_jitter_is_uniform_around_half_the_round_trip_and_never_negative() -> None:
    draws = iter([0.0, 0.5, 0.75, 0.0])
    assert [latency(0.2, 0.04, 0.0, draws.__next__) for _ in range(3)] == pytest.approx(
        [0.06, 0.1, 0.12]
    )
    assert latency(0.02, 0.04, 0.0, draws.__next__) == 0.0


def test_repeated_loss_of_the_last_packet_doubles_the_wait() -> None:
    draws = iter([0.5, 0.09, 0.05, 0.1])  # the jitter, lost, lost again, there
    assert latency(0.1, 0.02, 0.1, draws.__next__) == pytest.approx(0.05 + 0.3 + 0.6)
    draws = iter([0.0] * 12 + [0.5])  # 0.2 + 0.4 + ... + 102.4 are ten; then 120 at the most
    assert latency(0.0, 0.0, 0.1, draws.__next__) == pytest.approx(0.2 * 1023 + 2 * 120)
