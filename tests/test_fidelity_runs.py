"""`testbed fidelity` on this host: what the README says of CPU shares and links."""

from __future__ import annotations

import json
import math
from typing import Any

import docker
import pytest

from tests.running import cli, left_in_docker

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def found(
    engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The figures of each device of both grids."""
    runs = tmp_path_factory.mktemp("fidelity")
    done = cli("fidelity", "--runtime", "docker", "--runs", runs, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CPU: at worst" in done.stdout
    assert left_in_docker(engine) == []
    files = sorted(runs.glob("*/fidelity.json"))
    assert len(files) == 2
    figures: dict[str, dict[str, Any]] = {}
    for file in files:
        figures |= json.loads(file.read_text())["devices"]
    return figures


@pytest.mark.parametrize("device", ["cpu-5", "cpu-10", "cpu-25", "cpu-50"])
def test_a_share_is_met_within_3_percent(found: dict[str, Any], device: str) -> None:
    assert abs(found[device]["cpu"]["error"]) < 3


@pytest.mark.parametrize("device", ["slow", "3g", "dsl", "4g", "cable", "fibre"])
def test_rates_are_met_within_6_percent(found: dict[str, Any], device: str) -> None:
    for direction in ("up", "down"):
        assert abs(found[device][direction]["error"]) < 6, found[device]


@pytest.mark.parametrize(("device", "trips"), [("lossy", 500), ("bad", 500)])
def test_as_many_packets_are_lost_as_was_asked(found: dict[str, Any], device: str, trips: int) -> None:
    """Within four standard errors of so many round trips."""
    loss = found[device]["loss"]
    error = math.sqrt(loss["asked"] * (1 - loss["asked"]) / trips)
    assert abs(loss["got"] - loss["asked"]) < 4 * error


def test_delays_spread_as_was_asked(found: dict[str, Any]) -> None:
    """The standard deviation of 100 round trips, each the sum of two uniform delays, is known to 5.9 %
    (standard error; the kurtosis of such a sum is 2.4)."""
    jitter = found["4g"]["jitter"]
    assert abs(jitter["error"]) < 4 * 5.9, jitter


@pytest.mark.parametrize("device", ["slow", "3g", "dsl", "lossy", "cable"])
def test_a_round_trip_takes_what_was_asked(found: dict[str, Any], device: str) -> None:
    """Within 2 ms, a millisecond each way, or 2 %."""
    rtt = found[device]["rtt"]
    assert -0.0005 < rtt["got"] - rtt["asked"] < max(0.002, 0.02 * rtt["asked"])
