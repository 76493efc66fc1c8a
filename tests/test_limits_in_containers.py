"""Limits of a device's container in a whole run: read back from the kernel by its init."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import docker
import pytest

from testbed.runtimes.docker.containers import COMPONENT_LABEL, RUN_LABEL
from tests.running import Finished, left_in_docker, started, until_printed, write_topology

MIB = 2**20


def last_limits(run: Finished, device: str) -> dict[str, Any]:
    limits = [line["limits"] for line in run.telemetry if "limits" in line and line["device"] == device]
    found: dict[str, Any] = limits[-1]
    return found


@pytest.mark.docker
@pytest.mark.timeout(600)
def test_limits_are_read_back_and_outside_changes_make_the_run_not_valid(
    engine: docker.DockerClient, built: object, tmp_path: Path
) -> None:
    topology = write_topology(
        tmp_path,
        devices=[
            {"name": name, "cpu": 0.1, "timing": "1s", "memory": "300MiB"}
            for name in ("kept", "set", "other")
        ],
        scenario=[{"at": "2s", "set": "set", "cpu": 0.2}],
        evaluate={"every": "5s"},
        stop={"after": "10s"},
    )
    runs = tmp_path / "runs"
    with started("up", topology, "--runs", runs) as up:
        until_printed(up, "the run clock starts")
        (run,) = runs.iterdir()
        labels = [f"{RUN_LABEL}={run.name}", f"{COMPONENT_LABEL}=other"]
        (other,) = engine.containers.list(filters={"label": labels})
        time.sleep(3)
        other.update(mem_limit=500 * MIB, memswap_limit=600 * MIB)
        up.wait(timeout=120)
    ended = Finished.only_one_in(runs)
    kept, changed, wrong = (last_limits(ended, name) for name in ("kept", "set", "other"))
    assert (kept["quota"], kept["period"], kept["memory"]) == (5_000, 50_000, 300 * MIB)
    assert kept.get("swap", 0) == 0
    assert changed["quota"] / changed["period"] == pytest.approx(0.2)
    assert wrong["memory"] == 500 * MIB
    (reason,) = (r for r in ended.manifest["validity"]["reasons"] if "other limits" in r)
    assert reason.startswith(
        "the kernel has other limits for other: its memory limit is 524288000 bytes"
    )
    assert "(and" not in reason
    assert left_in_docker(engine, run.name) == []
