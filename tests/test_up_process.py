"""`testbed up --runtime process`: local processes, real broker, no Docker."""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from agents.config import KEEPALIVE
from analysis.load import load
from tests import attacks
from tests.attacks import Facts
from tests.running import (
    Finished,
    Testbed,
    cli,
    interrupt,
    left_as_processes,
    started,
    until_printed,
    write_small_topology,
    write_topology,
)
from tests.waiting import eventually


@pytest.mark.timed
def test_short_trainings_take_as_long_as_the_cpu_share_says(tmp_path: Path) -> None:
    """A training of some 5 ms of CPU time could use up the budget that a process may save, and end in a
    third of its time. From the first sample of the run to the last, a tenth of the time in trainings is
    CPU time: what a step costs depends on this host."""
    topology = write_small_topology(
        tmp_path, devices=[{"name": "slow", "cpu": 0.1}], rule={"name": "fedasync"}, stop={"after": "6s"}
    )
    done = cli("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    run = load(Finished.only_one_in(tmp_path / "runs").path)
    samples = run.telemetry[run.telemetry["at"] > 0]
    first, last = samples["at"].min(), samples["at"].max()
    begin, end = (run.updates[name].clip(first, last) for name in ("train_start", "train_end"))
    used = samples["cpu"].max() - samples["cpu"].min()
    assert used / (end - begin).sum() == pytest.approx(0.1, rel=0.1)


@pytest.mark.timed
def test_dilated_run_is_reported_in_device_time(testbed: Testbed, tmp_path: Path) -> None:
    devices = [{"name": "a", "cpu": 0.4, "timing": "300ms"}]
    topology = write_topology(tmp_path, devices=devices, dilation=4, stop={"after": "2s"})
    begin = time.monotonic()
    done = testbed("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.code == 0, done.out + done.err
    assert time.monotonic() - begin > 8
    run = Finished.only_one_in(tmp_path / "runs")
    assert run.records[-1].at == pytest.approx(2, abs=0.1)
    took = [u.sent - u.downloaded for u in run.updates]
    assert 0.3 <= statistics.median(took) < 0.35
    assert len(took) >= 4
    broker = (run.path / "logs" / "broker.log").read_text()
    assert re.search(rf" as a \(.*k{4 * KEEPALIVE}\b", broker), broker


@pytest.mark.parametrize("stage", ["Starting broker", "the run clock starts"])
def test_interrupt_leaves_nothing(stage: str, tmp_path: Path) -> None:
    """In the first stage the link is measured, for 5 s."""

    def samples(runs: Path) -> list[dict[str, Any]]:
        return [one for one in Finished.only_one_in(runs).telemetry if "cpu" in one]

    link = {"up": "1mbit", "down": "1mbit"} if stage == "Starting broker" else None
    changes = {"devices": [{"name": "far", "cpu": 0.3, "link": link}], "rule": {"name": "fedasync"}}
    topology, runs = write_small_topology(tmp_path, **changes), tmp_path / "runs"
    with started("up", topology, "--runtime", "process", "--runs", runs) as up:
        until_printed(up, stage)
        if link is None:
            # What ran is judged by samples of its CPU time.
            eventually(lambda: Finished.only_one_in(runs).updates)
            before = len(samples(runs))
            eventually(lambda: len(samples(runs)) > before + 2)
        _, output = interrupt(up)
    assert up.returncode == 130, output
    assert "Traceback" not in output
    (path,) = runs.iterdir()
    assert left_as_processes(path.name) == []
    judged = [(path / "fidelity.json").exists(), "validity" in (path / "manifest.json").read_text()]
    judged += ["CPU: " in output, f"Next: testbed up --resume {path}" in output]
    assert set(judged) == {stage == "the run clock starts"}, (judged, output)


def test_detached_run_is_listed_and_removed(testbed: Testbed, tmp_path: Path) -> None:
    """One of its clients gains no rights at the broker beyond its own."""
    runs = tmp_path / "runs"
    topology = write_small_topology(tmp_path, broker={"tls": True})
    up = testbed("up", "-d", topology, "--runtime", "process", "--runs", runs)
    assert up.code == 0, up.out + up.err
    (path,) = runs.iterdir()
    assert path.name in testbed("ps").out
    assert "ready" in testbed("logs", path.name, "controller").out.lower()
    facts = Facts(path.name, "fast", "slow", str(path / "work" / "fast.json"))
    made = list(attacks.made(attacks.ON_THE_BROKER, facts))
    assert [name for name, refusal in made if refusal is None] == []
    assert testbed("down", path.name).code == 0
    assert left_as_processes(path.name) == []
    manifest = Finished.only_one_in(runs).manifest
    assert manifest["outcome"] == "interrupted"
    assert manifest["validity"].keys() == {"valid", "reasons", "unjudged"}
    assert attacks.reconnected((path / "logs" / "broker.log").read_text()) == {"fast"}
    assert manifest["refused"].keys() == {"fast", "?"}


def test_processes_end_with_a_killed_controller(testbed: Testbed, tmp_path: Path) -> None:
    topology = write_small_topology(tmp_path)
    with started("up", topology, "--runtime", "process", "--runs", tmp_path / "runs") as up:
        until_printed(up, "the run clock starts")
        os.kill(up.pid, signal.SIGKILL)
        up.wait()
    (path,) = (tmp_path / "runs").iterdir()
    eventually(lambda: left_as_processes(path.name) == [])
    kept = {
        "events.jsonl",
        "logs",
        "manifest.json",
        "models",
        "state",
        "telemetry.jsonl",
        "topology.yaml",
    }
    assert (path / "work" / "fast.json").exists()  # with a password
    assert testbed("down", path).out == f"{path.name}: down\n"
    assert {one.name for one in path.iterdir()} == kept
