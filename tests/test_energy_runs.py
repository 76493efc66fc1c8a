"""Batteries of real runs: devices power off at the computed time, and return when they are charged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import docker
import pytest

from agents import events
from agents.energy.messages import RoundEnergy
from tests.running import (
    Finished,
    Testbed,
    cli,
    interrupt,
    left_as_processes,
    left_in_docker,
    started,
    until_printed,
    write_topology,
)
from tests.waiting import eventually

LEARNING: dict[str, Any] = {
    "task": {"name": "digits-logreg", "local": {"steps": 20, "lr": 0.01}},
    "seed": 7,
}


def power(run: Finished, device: str) -> list[tuple[str, float]]:
    """Power-offs and returns of `device`, with their times in seconds."""
    return [
        (record.details["action"], record.at)
        for record in run.records
        if isinstance(record, events.Acted) and (record.device, record.source) == (device, "battery")
    ]


@pytest.fixture(scope="module")
def drained(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Run in containers: the battery of `battery` lasts 6 s, and is 90 % full after 5.4 s more."""
    folder = tmp_path_factory.mktemp("energy")
    cell = {"capacity": "6J", "return_at": "90%", "loses_memory": True}
    topology = write_topology(
        folder,
        **LEARNING,
        rule={"name": "fedbuff", "buffer_size": 1},
        devices=[
            {
                "name": "battery",
                "cpu": 0.2,
                "timing": "800ms",
                "energy": {"idle": "2W", "core": "0W", "battery": cell, "charger": "1W"},
            },
            {
                "name": "mains",
                "cpu": 0.2,
                "energy": {"idle": "1W", "core": "2W", "sent": "5J/MB", "received": "2J/MB"},
            },
        ],
        stop={"after": "18s"},
    )
    done = cli("up", topology, "--runtime", "docker", "--runs", folder / "runs", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "J emulated, this host:" in " ".join(done.stdout.split())  # long lines are broken
    return Finished.only_one_in(folder / "runs")


@pytest.mark.timed
@pytest.mark.docker
def test_power_off_and_return_are_at_the_computed_times(drained: Finished) -> None:
    """6 J at 2 W − 1 W; 5.4 J at 1 W; then 5.4 J at 2 W − 1 W."""
    found = power(drained, "battery")
    assert [action for action, _ in found[:3]] == ["poweroff", "poweron", "poweroff"]
    assert [at for _, at in found[:3]] == pytest.approx([6.0, 11.4, 16.8], rel=0.02)


@pytest.mark.timed
@pytest.mark.docker
def test_device_without_power_loses_its_round_and_sends_nothing(drained: Finished) -> None:
    (_, off), (_, on), (_, again), *_ = power(drained, "battery")
    of_battery = [r for r in drained.records if getattr(r, "client", None) == "battery"]
    assert not [r for r in of_battery if isinstance(r, events.UpdateApplied) and off < r.sent < on]
    assert [r for r in of_battery if isinstance(r, events.UpdateApplied) and on < r.sent < again]
    unfinished = [r for r in of_battery if isinstance(r, events.RoundUnfinished)]
    assert unfinished[0].at == pytest.approx(off, abs=1.0)
    lost = [r for r in of_battery if isinstance(r, RoundEnergy) and r.outcome == "lost"]
    assert (lost[0].dispatch, lost[0].at) == (unfinished[0].dispatch, unfinished[0].at)
    statuses = [r.state for r in of_battery if isinstance(r, events.ClientStatus)]
    assert statuses[:3] == ["offline", "joining", "ready"]


@pytest.mark.timed
@pytest.mark.docker
def test_energy_is_that_of_time_cpu_and_bytes(drained: Finished) -> None:
    """Checked against the other telemetry of the same device, between its first and last sample."""
    samples = [line for line in drained.telemetry if line["device"] == "mains"]
    energy: list[dict[str, Any]] = [line for line in samples if "energy" in line]
    usage = [line for line in samples if "cpu" in line and line["at"] > energy[0]["at"] - 0.5]
    begin, end = usage[0], usage[-1]
    # The energy goes on to the end of the run, after the last sample of what else was used.
    first, last = energy[0], min(energy, key=lambda line: abs(line["at"] - end["at"]))
    time, cpu, sent, received = (end[name] - begin[name] for name in ("at", "cpu", "sent", "received"))
    consumed = last["energy"]["consumed"] - first["energy"]["consumed"]
    # 1 core with its 2 W stands for the share of 0.2.
    assert consumed == pytest.approx(time + 10 * cpu + 5e-6 * sent + 2e-6 * received, rel=0.02)
    rounds = [r for r in drained.records if isinstance(r, RoundEnergy) and r.client == "mains"]
    updates = [r for r in drained.updates if r.client == "mains"]
    # Rounds of the last seconds may end after the last sample that the aggregator waits for.
    assert {r.dispatch for r in rounds} >= {r.dispatch for r in updates if r.sent < 15.0}
    assert 0 < sum(r.energy_j for r in rounds) < last["energy"]["consumed"]


@pytest.mark.timed
@pytest.mark.docker
def test_nothing_is_left_of_a_run_with_batteries(drained: Finished, engine: docker.DockerClient) -> None:
    assert left_in_docker(engine, drained.path.name) == []


def test_run_of_processes_waits_for_the_charger_and_resumes(testbed: Testbed, tmp_path: Path) -> None:
    """With `mains` down and `pi` without power nobody is left, and the run goes on. The level of the
    battery outlasts an interruption; the charger that was unplugged by hand is back."""
    cell = {"capacity": "60J", "power_off_at": "10%", "return_at": "20%"}
    topology = write_topology(
        tmp_path,
        **LEARNING,
        rule={"name": "fedbuff", "buffer_size": 1},
        devices=[
            {
                "name": "pi",
                "cpu": 0.2,
                "timing": "200ms",
                "energy": {
                    "idle": "1W",
                    "core": "1W",
                    "sent": "1J/MB",
                    "battery": cell,
                    "charger": "3W",
                },
            },
            {"name": "mains", "cpu": 0.2, "timing": "200ms"},
        ],
        stop={"after": "10min"},
    )
    runs = tmp_path / "runs"
    with started("up", topology, "--runtime", "process", "--runs", runs) as up:
        until_printed(up, "the run clock starts")
        (run,) = runs.iterdir()
        for command, why in (
            ("set {} mains --battery 50%", "mains has no battery"),
            ("charge {} mains", "mains has no battery"),
            ("charge {} pi --watts 10", "expected a power with its unit"),
            ("set {} pi --battery 120%", "--battery 120%: expected a share"),
        ):
            refused = testbed(*command.format(run).split(), "--runs", runs)
            assert (refused.code, why in refused.err) == (2, True), refused.err
        for command in ("set {} pi --battery 10% --cpu 25%", "unplug {} pi", "kill {} mains"):
            assert testbed(*command.format(run).split(), "--runs", runs).code == 0
        until_printed(up, "offline: mains")
        interrupt(up)
    assert left_as_processes(run.name) == []
    first = Finished.only_one_in(runs)
    began, ended = first.records[0], first.records[-1]
    assert isinstance(began, events.RunStarted)
    assert isinstance(ended, events.RunEnded)
    *_, last = (line["at"] for line in first.telemetry if "energy" in line)
    zero = began.wall_clock - first.manifest["monotonic_zero"]
    assert last - zero == pytest.approx(ended.at * first.manifest.get("dilation", 1.0), abs=0.001)
    assert [action for action, _ in power(first, "pi")][:1] == ["poweroff"]

    def after_the_return() -> bool:
        """Whether the device has power again since the resume, and has used it."""
        actions = [at for action, at in since_the_resume() if action == "poweron"]
        updates = Finished.only_one_in(runs).updates
        return bool(actions) and any(u.client == "pi" and u.sent > actions[0] for u in updates)

    def since_the_resume() -> list[tuple[str, float]]:
        found = Finished.only_one_in(runs)
        begins = [record.at for record in found.records if isinstance(record, events.RunStarted)]
        return [one for one in power(found, "pi") if one[1] >= begins[-1]] if begins[1:] else []

    with started("up", "--resume", run, "--runs", runs) as up:
        eventually(after_the_return)
        interrupt(up)
    assert [action for action, _ in since_the_resume()[:2]] == ["poweroff", "poweron"]
    whole = Finished.only_one_in(runs)
    energy = [line["energy"] for line in whole.telemetry if "energy" in line]
    consumed = [one["consumed"] for one in energy]
    assert consumed == sorted(consumed)
    assert all(0 <= one["level"] <= 1 for one in energy)
