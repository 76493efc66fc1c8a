"""`testbed calibrate --fidelity` on this host, against what docs/evidence/fidelity.md says."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.load import load
from tests.running import cli, left_as_processes, left_in_docker

pytestmark = pytest.mark.timed

CPU_ERROR = {"docker": 3.0, "process": 10.0}
"""%."""


@dataclass(frozen=True)
class Found:
    runtime: str
    devices: dict[str, dict[str, Any]]
    """The figures of each device of both grids."""
    telemetry: pd.DataFrame
    updates: pd.DataFrame
    """Fidelity of both runs."""


@pytest.fixture(
    scope="module", params=[pytest.param("docker", marks=pytest.mark.docker), pytest.param("process")]
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    runtime: str = request.param
    engine = request.getfixturevalue("engine") if runtime == "docker" else None
    files = _calibrate(runtime, tmp_path_factory.mktemp("fidelity"))
    for run in (file.parent.name for file in files):
        assert (left_as_processes(run) if engine is None else left_in_docker(engine, run)) == []
    figures: dict[str, dict[str, Any]] = {}
    for file in files:
        figures |= json.loads(file.read_text())["devices"]
    made = [load(file.parent) for file in files]
    telemetry, updates = (
        pd.concat(getattr(run, name) for run in made) for name in ("telemetry", "updates")
    )
    return Found(runtime, figures, telemetry, updates)


def _calibrate(runtime: str, runs: Path) -> list[Path]:
    """Return `fidelity.json` of the runs of both grids."""
    done = cli("calibrate", "--fidelity", "--runtime", runtime, "--runs", runs, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CPU: at worst" in done.stdout
    files = sorted(runs.glob("*/fidelity.json"))
    assert len(files) == 2
    return files


@pytest.mark.parametrize("device", ["cpu-5", "cpu-10", "cpu-25", "cpu-50"])
def test_cpu_share_is_met(found: Found, device: str) -> None:
    assert abs(found.devices[device]["cpu"]["error"]) < CPU_ERROR[found.runtime]


@pytest.mark.parametrize("device", ["cpu-10", "cpu-25"])
def test_training_time_follows_the_cpu_share(found: Found, device: str) -> None:
    """The CPU time that it used, over its share: how much CPU time a step costs is the host's, and more
    where its cores are busy and the share is small. From the run's first sample, as what is used between
    it and the one before is mostly the device's start, which has no limit, to the last."""
    samples = found.telemetry[found.telemetry["device"] == device]
    updates = found.updates[found.updates["client"] == device]
    first, last = samples["at"][samples["at"] > 0].min(), samples["at"].max()
    begin, end = (updates[name].clip(first, last) for name in ("train_start", "train_end"))
    begun, ended = (np.interp(at, samples["at"], samples["cpu"]) for at in (begin, end))
    assert (ended - begun).sum() / (end - begin).sum() == pytest.approx(int(device[4:]) / 100, rel=0.06)


@pytest.mark.parametrize("device", ["slow", "3g", "dsl", "4g", "cable", "fibre"])
def test_rates_are_met_within_6_percent(found: Found, device: str) -> None:
    for direction in ("up", "down"):
        assert abs(found.devices[device][direction]["error"]) < 6, found.devices[device]


@pytest.mark.parametrize(("device", "trips"), [("lossy", 500), ("bad", 500)])
def test_packet_loss_is_met(found: Found, device: str, trips: int) -> None:
    """Within four standard errors of so many round trips; no relay loses any, so they are left out."""
    if found.runtime == "process":
        assert device not in found.devices
        return
    loss = found.devices[device]["loss"]
    error = math.sqrt(loss["asked"] * (1 - loss["asked"]) / trips)
    assert abs(loss["got"] - loss["asked"]) < 4 * error


def test_jitter_is_met(found: Found, tmp_path: Path) -> None:
    """The standard deviation of 100 round trips, each the sum of two uniform delays, is known to 5.9 %
    (standard error; the kurtosis of such a sum is 2.4). A host that stops for 0.1 s once in these round
    trips adds more than that: a jitter that is wrong is so in each of three measurements."""
    jitter = found.devices["4g"]["jitter"]
    for again in range(2):
        if abs(jitter["error"]) < 4 * 5.9:
            return
        made = _calibrate(found.runtime, tmp_path / f"{again}")
        figures = [json.loads(file.read_text())["devices"] for file in made]
        jitter = next(devices["4g"]["jitter"] for devices in figures if "4g" in devices)
    assert abs(jitter["error"]) < 4 * 5.9, jitter


@pytest.mark.parametrize("device", ["slow", "3g", "dsl", "lossy", "cable"])
def test_round_trip_time_is_met(found: Found, device: str) -> None:
    """Within 2 ms, a millisecond each way, or 2 %."""
    if device == "lossy" and found.runtime == "process":
        assert device not in found.devices
        return
    rtt = found.devices[device]["rtt"]
    assert abs(rtt["got"] - rtt["asked"]) < max(0.002, 0.02 * rtt["asked"])
