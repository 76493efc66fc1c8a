"""Runs beside busy processes of this host: what the devices get, and what the verdict is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import psutil
import pytest

from tests.running import Finished, left_in_docker, started, until_printed, write_topology

pytestmark = pytest.mark.timed

DEVICES = [{"name": "fast", "cpu": 0.4}, {"name": "slow", "count": 2, "cpu": 0.1}]
LAST_CORE = max(os.sched_getaffinity(0))
"""Devices are on the last cores; on a host of two, all of them are on this one."""


Loops = list[subprocess.Popen[bytes]]


@contextmanager
def busy(core: int, count: int = 2) -> Iterator[Loops]:
    """Processes that want all of a core."""
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        for loop in loops:
            psutil.Process(loop.pid).cpu_affinity([core])
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(folder: Path, runtime: str, loops: Loops, after: str = "6s") -> Finished:
    """A run beside the busy processes. They rest while it is launched, which
    beside them would take much longer."""
    task = {"name": "digits-logreg", "local": {"steps": 500, "lr": 0.01}}  # they hardly ever wait
    topology = write_topology(folder, task=task, devices=DEVICES, stop={"after": after})
    with started("up", topology, "--runtime", runtime, "--runs", folder / "runs") as up:
        until_printed(up, "Busy host: other work uses")
        send(loops, signal.SIGSTOP)
        until_printed(up, "the run clock starts")
        send(loops, signal.SIGCONT)
        output, _ = up.communicate(timeout=900)
    assert up.returncode == 0, output
    return Finished.only_one_in(folder / "runs")


def send(loops: Loops, number: signal.Signals) -> None:
    for loop in loops:
        loop.send_signal(number)


@pytest.mark.docker
@pytest.mark.skipif(os.cpu_count() != 2, reason="which core is whose is known on two cores only")
def test_containers_keep_their_shares_beside_busy_processes(
    engine: docker.DockerClient, tmp_path: Path
) -> None:
    with busy(LAST_CORE) as some, busy(0) as others:
        found = run(tmp_path, "docker", [*some, *others])
    fidelity = json.loads((found.path / "fidelity.json").read_text())
    for name, figures in fidelity["devices"].items():
        assert abs(figures["cpu"]["error"]) < 3, (name, figures)
    assert found.manifest["validity"]["valid"] is False  # steps cost more, as caches are cold
    reasons = found.manifest["validity"]["reasons"]
    assert any("of the devices' cores" in reason for reason in reasons), reasons
    assert not any("of a core where" in reason for reason in reasons), reasons
    assert left_in_docker(engine, found.path.name) == []


def test_run_of_processes_beside_busy_ones_is_never_valid(tmp_path: Path) -> None:
    with busy(LAST_CORE, 4) as loops:
        found = run(tmp_path, "process", loops, after="4s")
    assert found.manifest["validity"]["valid"] is False
