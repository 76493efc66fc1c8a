"""Effects of a scenario on containers and on local processes, and their traces in the run directory."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

import pytest

from agents import events
from tests.running import (
    Finished,
    cli,
    left_as_processes,
    left_in_docker,
    write_topology,
)

pytestmark = pytest.mark.timed

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


@pytest.fixture(scope="module", params=[pytest.param("docker", marks=pytest.mark.docker), "process"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Run with the scenario. Among processes two more devices share the uplink of a Wi-Fi."""
    runtime: str = request.param
    if runtime == "docker":
        request.getfixturevalue("built")
    folder = tmp_path_factory.mktemp("played")
    wifi = {"cpu": 0.1, "timing": "200ms", "access": {"name": "wifi", "up": "128kbit"}}
    sharing = [
        {"name": "a", **wifi},
        {"name": "b", **wifi, "link": {"up": "1mbit", "rtt": "20ms"}},
    ]
    topology = write_topology(
        folder,
        task={"name": "digits-logreg", "local": {"steps": 20, "lr": 0.01}},
        devices=DEVICES + (sharing if runtime == "process" else []),
        rule={"name": "fedbuff", "buffer_size": 1},
        scenario=SCENARIO,
        stop={"after": "20s"},
    )
    done = cli("up", topology, "--runtime", runtime, "--runs", folder / "runs", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^CPU: .*\blinks: ", done.stdout, re.MULTILINE | re.DOTALL), done.stdout
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


def test_bytes_sent_and_received_are_counted(played: Finished) -> None:
    last = next(s for s in reversed(played.telemetry) if s["device"] == "mid" and "cpu" in s)
    payload = sum(u.bytes for u in played.updates if u.client == "mid" and u.sent > 9)
    assert last["sent"] > payload > 0
    assert last["received"] > payload  # a model is as large


def test_devices_of_one_access_share_its_rate(played: Finished) -> None:
    """An update of 2.6 kB takes 0.17 s at 128 kbit/s; each device alone would send about as many."""
    if played.manifest["runtime"] == "docker":
        return
    arrived = [u for u in played.updates if u.client in "ab" and 2 < u.arrived < 8]
    rate = 8 * 1514 / 1448 * sum(u.bytes for u in arrived) / 6
    assert 0.7 * 128_000 < rate < 1.05 * 128_000
    counts = [sum(u.client == name for u in arrived) for name in ("a", "b")]
    assert min(counts) > 0.7 * max(counts)
    found = json.loads((played.path / "fidelity.json").read_text())["segments"]["wifi"]["up"]
    for figures in found.values():
        assert figures["asked"] == 128_000
        assert abs(figures["error"]) < 6, found


def test_nothing_is_left_behind(played: Finished, request: pytest.FixtureRequest) -> None:
    assert left_as_processes(played.path.name) == []
    if played.manifest["runtime"] == "docker":
        assert left_in_docker(request.getfixturevalue("engine"), played.path.name) == []
