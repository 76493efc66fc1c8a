"""`testbed up --runtime process`: local processes, real broker, no Docker."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from agents import events
from tests.running import (
    Finished,
    cli,
    interrupt,
    left_as_processes,
    started,
    until_printed,
    write_small_topology,
    write_topology,
)


def test_runs_to_the_end(tmp_path: Path) -> None:
    """In rounds; other tests run the other rules."""
    stop = {"updates": 20, "after": "60s"}
    topology = write_small_topology(tmp_path, rule={"name": "fedavg"}, stop=stop)
    done = cli("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    run = Finished.only_one_in(tmp_path / "runs")
    assert isinstance(run.records[-1], events.RunEnded)
    assert run.records[-1].reason == "updates"
    assert len(run.updates) >= 20
    for u in run.updates:
        times = [u.dispatched, u.downloaded, u.train_start, u.train_end, u.sent, u.arrived, u.applied]
        assert times == sorted(times)
    assert left_as_processes() == []


@pytest.mark.parametrize("stage", ["Starting broker", "the run clock starts"])
def test_interrupt_leaves_nothing(stage: str, tmp_path: Path) -> None:
    """At first the link is measured, for 5 s."""
    link = {"up": "1mbit", "down": "1mbit"} if stage == "Starting broker" else None
    topology = write_small_topology(tmp_path, devices=[{"name": "far", "cpu": 0.3, "link": link}])
    with started("up", topology, "--runtime", "process", "--runs", tmp_path / "runs") as up:
        until_printed(up, stage)
        time.sleep(1)
        took, output = interrupt(up)
    assert up.returncode == 130, output
    assert "Traceback" not in output
    assert took < 10
    assert left_as_processes() == []


def test_detached_run_is_seen_and_taken_down(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    up = cli("up", "-d", write_small_topology(tmp_path), "--runtime", "process", "--runs", runs)
    assert up.returncode == 0, up.stdout + up.stderr
    (path,) = runs.iterdir()
    assert path.name in cli("ps").stdout
    assert "ready" in cli("logs", path.name, "controller").stdout.lower()
    assert cli("down", path.name).returncode == 0
    assert left_as_processes() == []
    assert Finished.only_one_in(runs).manifest["outcome"] == "interrupted"


def test_killed_controller_takes_its_processes_along(tmp_path: Path) -> None:
    topology = write_small_topology(tmp_path)
    with started("up", topology, "--runtime", "process", "--runs", tmp_path / "runs") as up:
        until_printed(up, "the run clock starts")
        os.kill(up.pid, signal.SIGKILL)
        up.wait()
    deadline = time.monotonic() + 5
    while left_as_processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_as_processes() == []


def test_a_link_that_loses_packets_is_refused(tmp_path: Path) -> None:
    topology = write_topology(tmp_path, devices=[{"name": "far", "cpu": 0.5, "link": {"loss": "1%"}}])
    done = cli("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.returncode == 2
    assert "devices[0].link.loss" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
