"""The time model: steps, floors, transfers one after the other, a server link that all share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agents.config import Duration, Link, Local
from testbed.plan import PlannedDevice
from testbed.virtual.timing import Network, Pipe, Speed, Work


def _device(**fields: Any) -> PlannedDevice:
    plain: dict[str, Any] = {"cpu": None, "memory": 0, "local": Local(steps=1)}
    return PlannedDevice("a", "a", **(plain | fields))


def _constant(seconds: float) -> Duration:
    return Duration("constant", {"value": seconds})


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
def test_fifty_steps(device: PlannedDevice, seconds: float) -> None:
    work = Work(flops=0.1e9, seconds=0.002)
    speed = Speed(device, work, np.random.default_rng(0))
    assert speed.training_time(50) == pytest.approx(seconds)


def test_another_share_makes_all_steps_longer() -> None:
    speed = Speed(_device(cpu=0.5), Work(seconds=0.002), np.random.default_rng(0))
    assert speed.set_share(0.125) == 4
    assert speed.training_time(50) == pytest.approx(0.8)


def test_transfers_go_through_one_after_the_other() -> None:
    pipe = Pipe(rate=8000)  # 1000 bytes per second
    assert [pipe.through(at, 500) for at in (0.0, 0.1, 2.0)] == [0.5, 1.0, 2.5]


def test_a_transfer_crosses_both_links_and_half_a_round_trip() -> None:
    network = Network(Link(up=16_000, down=None))
    near = network.line(_device(link=Link(up=8000, down=8000, rtt=0.2)))
    far = network.line(_device())
    assert near.download(0.0, 1000) == pytest.approx(0.5 + 1.0 + 0.1)
    assert far.download(0.0, 1000) == pytest.approx(1.0)  # the server's uplink had another to send first
    assert near.upload(3.0, 1000) == pytest.approx(3.0 + 1.0 + 0.1)
    assert far.upload(3.0, 1000) == 3.0


def test_a_request_does_not_overtake_a_model() -> None:
    line = Network().line(_device(link=Link(down=8000, rtt=0.2)))
    assert line.request(0.0) == pytest.approx(0.1)
    arrival = line.download(0.0, 1000)
    assert line.request(0.5) == pytest.approx(arrival)
