"""`testbed up --runtime process`: local processes, real broker, no Docker."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("rule", ["fedavg", "fedasync", "fedbuff"])
def test_runs_to_the_end(rule: str, tmp_path: Path) -> None:
    topology = write_small_topology(tmp_path, rule={"name": rule}, stop={"updates": 60, "after": "60s"})
    done = cli("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    run = Finished.only_one_in(tmp_path / "runs")
    assert isinstance(run.records[-1], events.RunEnded)
    assert len(run.updates) >= 60
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


def test_devices_of_one_access_share_its_rate(tmp_path: Path) -> None:
    """An update of 2.6 kB takes 0.17 s at 128 kbit/s; each device alone would send about as many."""
    wifi = {"name": "wifi", "up": "128kbit"}
    topology = write_topology(
        tmp_path,
        task={"name": "digits-logreg", "local": {"steps": 5, "lr": 0.01}},
        rule={"name": "fedbuff", "buffer_size": 1},
        devices=[
            {"name": "a", "cpu": 0.3, "access": wifi},
            {"name": "b", "cpu": 0.3, "access": wifi, "link": {"up": "1mbit", "rtt": "20ms"}},
        ],
        stop={"after": "8s"},
    )
    done = cli("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    run = Finished.only_one_in(tmp_path / "runs")
    devices = json.loads((run.path / "fidelity.json").read_text())["devices"]
    for figures in devices.values():
        assert figures["up"]["asked"] == 128_000
        assert abs(figures["up"]["error"]) < 6, figures
    arrived = [u for u in run.updates if 2 < u.arrived < 8]
    rate = 8 * 1514 / 1448 * sum(u.bytes for u in arrived) / 6
    assert 0.7 * 128_000 < rate < 1.05 * 128_000
    counts = [sum(u.client == name for u in arrived) for name in ("a", "b")]
    assert min(counts) > 0.7 * max(counts)
