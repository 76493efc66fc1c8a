"""Effects of a scenario on the devices of a real run, and their traces in the run directory."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

import docker
import pytest

from agents import events
from tests.running import Finished, Testbed, cli, left_in_docker, write_topology

pytestmark = [pytest.mark.docker, pytest.mark.timed]

MID = {"up": "2mbit", "down": "5mbit", "rtt": "60ms"}
FAR = {"up": "256kbit", "down": "1mbit", "rtt": "300ms"}
DEVICES = [
    {"name": "near", "cpu": 0.2},
    {"name": "mid", "cpu": 0.2, "timing": "200ms", "link": MID},
    {"name": "far", "cpu": 0.15, "link": FAR},
    {"name": "late", "cpu": 0.2, "timing": "200ms"},
]
SCENARIO = [
    {"at": "2s", "set": "near", "cpu": 0.05},
    {"at": "4s", "set": "far", "link": {"up": "2mbit", "rtt": "20ms"}},
    {"at": "5s", "crash": "mid", "restart_after": "4s"},
    {"at": "6s", "pause": "near", "for": "3s"},
    {"at": "8s", "disconnect": "far", "for": "3s"},
    {"at": "10s", "join": "late"},
    {"at": "17s", "leave": "near"},
]


@pytest.fixture(scope="module")
def played(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("played")
    topology = write_topology(
        folder,
        task={"name": "digits-logreg", "local": {"steps": 20, "lr": 0.01}},
        devices=DEVICES,
        scenario=SCENARIO,
        stop={"after": "20s"},
        durability="recording",
    )
    done = cli("up", topology, "--runtime", "docker", "--runs", folder / "runs", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "at worst" in done.stdout
    return Finished.only_one_in(folder / "runs")


def sent(run: Finished, device: str, begin: float, end: float) -> list[float]:
    """When `device` sent the updates of that time that arrived then."""
    return [u.sent for u in run.updates if u.client == device and begin < u.sent and u.arrived < end]


def test_every_action_is_recorded_with_its_lateness(played: Finished) -> None:
    acted = [record for record in played.records if isinstance(record, events.Acted)]
    assert [(a.device, a.details["action"]) for a in acted] == [
        ("near", "set"),
        ("far", "set"),
        ("mid", "crash"),
        ("near", "pause"),
        ("far", "disconnect"),
        ("mid", "restart"),
        ("near", "resume"),
        ("late", "join"),
        ("far", "reconnect"),
        ("near", "leave"),
    ]
    due = [2, 4, 5, 6, 8, 9, 9, 10, 11, 17]
    assert [a.at - a.lateness for a in acted] == pytest.approx(due, abs=1e-4)
    assert max(a.lateness for a in acted) < 0.5


@pytest.mark.parametrize(
    ("device", "before", "away", "after"),
    [
        ("mid", (0, 5), (5.2, 9), (9, 20)),
        ("near", (0, 6), (6.2, 9), (9, 17)),
        ("far", (0, 8), (8.2, 11), (11, 20)),
        ("late", None, (0, 10), (10, 20)),
        ("near", (9, 17), (17.2, 20), None),
    ],
)
def test_device_works_except_while_absent(
    played: Finished,
    device: str,
    before: tuple[float, float] | None,
    away: tuple[float, float],
    after: tuple[float, float] | None,
) -> None:
    assert not sent(played, device, *away)
    for there in (before, after):
        assert there is None or sent(played, device, *there)


def test_changed_link_takes_effect(played: Finished) -> None:
    """2.6 kB, a packet of it in the bucket, at 256 kbit/s and 150 ms; then at 2 Mbit/s and 10 ms."""
    took = {u.sent: u.arrived - u.sent for u in played.updates if u.client == "far"}
    slow = [seconds for sent, seconds in took.items() if sent < 3]
    quick = [seconds for sent, seconds in took.items() if 5 < sent < 7]
    assert min(slow) > 0.18
    assert min(quick) < 0.15
    assert statistics.median(u.arrived - u.sent for u in played.updates if u.client == "near") < 0.15


def test_run_reports_the_measured_shares_and_links(played: Finished) -> None:
    devices: dict[str, dict[str, Any]] = json.loads((played.path / "fidelity.json").read_text())[
        "devices"
    ]
    for device in ("mid", "far"):
        for rate in ("up", "down"):
            assert abs(devices[device][rate]["error"]) < 6, devices[device]
        rtt = devices[device]["rtt"]
        assert -0.002 < rtt["got"] - rtt["asked"] < 0.05
    assert set(played.manifest["validity"]) == {"valid", "reasons", "unjudged"}


def test_run_directory_has_the_records_of_the_scenario(played: Finished) -> None:
    files = {"topology.yaml", "manifest.json", "events.jsonl", "telemetry.jsonl", "fidelity.json"}
    files |= {"models", "logs", "inputs.bin"}
    assert {path.name for path in played.path.iterdir()} == files
    models = {path.name for path in (played.path / "models").iterdir()}
    assert {"000000.safetensors", "final.safetensors"} <= models
    first, last = played.records[0], played.records[-1]
    assert isinstance(first, events.RunStarted)
    assert (first.clients, first.missing) == (("near", "mid", "far"), ("late",))
    assert isinstance(last, events.RunEnded)
    assert last.reason == "after"
    assert last.updates == len(played.updates) > 0


def test_replay_is_identical(testbed: Testbed, played: Finished) -> None:
    done = testbed("replay", played.path.name, "--runs", played.path.parent)
    assert done.code == 0, done.out + done.err
    assert f"{len(played.updates)} updates among them" in done.out


def test_timestamps_are_in_order(played: Finished) -> None:
    for u in played.updates:
        times = [u.dispatched, u.downloaded, u.train_start, u.train_end, u.sent, u.arrived, u.applied]
        assert times == sorted(times)
        assert u.staleness == u.applied_version - 1 - u.base_version >= 0


def test_devices_stay_within_their_memory_limit(played: Finished) -> None:
    samples = [s["memory"] for s in played.telemetry if s["device"] == "near" and "memory" in s]
    assert len(samples) > 5
    assert max(samples) < 300e6


def test_no_password_is_left_in_the_run_directory(played: Finished) -> None:
    """Nothing that looks like one of the passwords (32 URL-safe characters) is in any text."""
    for path in played.path.rglob("*"):
        if path.suffix in {".json", ".jsonl", ".log", ".yaml"}:
            assert not re.search(r"(?<![\w-])[\w-]{32}(?![\w-])", path.read_text()), path


def test_nothing_is_left_behind(played: Finished, engine: docker.DockerClient) -> None:
    assert left_in_docker(engine, played.path.name) == []
