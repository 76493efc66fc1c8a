"""Effects of a scenario on the devices of a real run, and their traces in the run directory."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

import docker
import pytest

from agents import events
from tests.running import Finished, Testbed, cli, left_as_processes, left_in_docker, write_topology

pytestmark = pytest.mark.alone

FAR = {"up": "256kbit", "down": "1mbit", "rtt": "300ms"}
DEVICES = [
    {"name": "near", "cpu": 0.2},
    {"name": "mid", "cpu": 0.2, "link": {"up": "2mbit", "down": "5mbit", "rtt": "60ms"}},
    {"name": "far", "cpu": 0.15, "link": FAR},
    {"name": "late", "cpu": 0.2},
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


def _sent(run: Finished, device: str, begin: float, end: float) -> list[float]:
    """When `device` sent the updates of that time that arrived then."""
    return [u.sent for u in run.updates if u.client == device and begin < u.sent and u.arrived < end]


@pytest.mark.docker
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


@pytest.mark.docker
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
    assert not _sent(played, device, *away)
    for there in (before, after):
        assert there is None or _sent(played, device, *there)


@pytest.mark.docker
def test_changed_link_takes_effect(played: Finished) -> None:
    """2.6 kB, a packet of it in the bucket, at 256 kbit/s and 150 ms; then at 2 Mbit/s and 10 ms."""
    took = {u.sent: u.arrived - u.sent for u in played.updates if u.client == "far"}
    slow = [seconds for sent, seconds in took.items() if sent < 3]
    quick = [seconds for sent, seconds in took.items() if 5 < sent < 7]
    assert min(slow) > 0.18
    assert min(quick) < 0.15
    assert statistics.median(u.arrived - u.sent for u in played.updates if u.client == "near") < 0.15


@pytest.mark.docker
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


@pytest.mark.docker
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


@pytest.mark.docker
def test_replay_is_identical(testbed: Testbed, played: Finished) -> None:
    done = testbed("replay", played.path.name, "--runs", played.path.parent)
    assert done.code == 0, done.out + done.err
    assert f"{len(played.updates)} updates among them" in done.out


@pytest.mark.docker
def test_timestamps_are_in_order(played: Finished) -> None:
    for u in played.updates:
        times = [u.dispatched, u.downloaded, u.train_start, u.train_end, u.sent, u.arrived, u.applied]
        assert times == sorted(times)
        assert u.staleness == u.applied_version - 1 - u.base_version >= 0


@pytest.mark.docker
def test_devices_stay_within_their_memory_limit(played: Finished) -> None:
    samples = [s["memory"] for s in played.telemetry if s["device"] == "near" and "memory" in s]
    assert len(samples) > 5
    assert max(samples) < 300e6


@pytest.mark.docker
def test_no_password_is_left_in_the_run_directory(played: Finished) -> None:
    """Nothing that looks like one of the passwords (32 URL-safe characters) is in any text."""
    for path in played.path.rglob("*"):
        if path.suffix in {".json", ".jsonl", ".log", ".yaml"}:
            assert not re.search(r"(?<![\w-])[\w-]{32}(?![\w-])", path.read_text()), path


@pytest.mark.docker
def test_nothing_is_left_behind(played: Finished, engine: docker.DockerClient) -> None:
    assert left_in_docker(engine, played.path.name) == []


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Processes: a link changes, one is cut, one comes and goes, two devices share theirs."""
    folder = tmp_path_factory.mktemp("linked")
    wifi = {"name": "wifi", "up": "128kbit"}
    topology = write_topology(
        folder,
        task={"name": "digits-logreg", "local": {"steps": 5, "lr": 0.01}},
        rule={"name": "fedbuff", "buffer_size": 1},
        devices=[
            {"name": "far", "cpu": 0.2, "link": FAR},
            {"name": "cut", "cpu": 0.2, "link": {"rtt": "20ms"}},
            {
                "name": "bus",
                "cpu": 0.2,
                "availability": {"trace": [["0s", "on"], ["2s", "off"], ["4s", "on"]]},
            },
            {"name": "a", "cpu": 0.2, "access": wifi},
            {"name": "b", "cpu": 0.2, "access": wifi, "link": {"up": "1mbit", "rtt": "20ms"}},
        ],
        scenario=[
            {"at": "4s", "set": "far", "link": {"up": "2mbit", "rtt": "20ms"}},
            {"at": "5s", "disconnect": "cut", "for": "2s"},
        ],
        stop={"after": "10s"},
    )
    done = cli("up", topology, "--runtime", "process", "--runs", folder / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "links: " in done.stdout
    run = Finished.only_one_in(folder / "runs")
    assert left_as_processes(run.path.name) == []
    return run


@pytest.mark.parametrize(("device", "begin", "end"), [("cut", 5.0, 7.0), ("bus", 2.0, 4.0)])
def test_disconnected_relay_passes_nothing(
    linked: Finished, device: str, begin: float, end: float
) -> None:
    assert _sent(linked, device, 0, begin)
    assert not [u for u in linked.updates if u.client == device and begin + 0.2 < u.arrived < end]
    assert _sent(linked, device, end, 10)


def test_changed_relay_takes_effect(linked: Finished) -> None:
    """As for containers above."""
    took = {u.sent: u.arrived - u.sent for u in linked.updates if u.client == "far"}
    assert min(seconds for sent, seconds in took.items() if sent < 3) > 0.18
    assert min(seconds for sent, seconds in took.items() if sent > 5) < 0.15


def test_relays_meet_the_requested_links(linked: Finished) -> None:
    assert linked.manifest["shaper"] == "relay"
    found = json.loads((linked.path / "fidelity.json").read_text())
    far = found["devices"]["far"]
    assert all(abs(far[name]["error"]) < 6 for name in ("up", "down", "rtt")), far
    for figures in found["segments"]["wifi"]["up"].values():
        assert figures["asked"] == 128_000
        assert abs(figures["error"]) < 6, found["segments"]


def test_relays_count_bytes_sent_and_received(linked: Finished) -> None:
    last = next(s for s in reversed(linked.telemetry) if s["device"] == "a" and "cpu" in s)
    payload = sum(update.bytes for update in linked.updates if update.client == "a")
    assert last["sent"] > payload
    assert last["received"] > payload  # a model is as large


def test_devices_of_one_access_share_its_rate(linked: Finished) -> None:
    """An update of 2.6 kB takes 0.17 s at 128 kbit/s; each device alone would send about as many."""
    arrived = [u for u in linked.updates if u.client in "ab" and 2 < u.arrived < 8]
    rate = 8 * 1514 / 1448 * sum(u.bytes for u in arrived) / 6
    assert 0.7 * 128_000 < rate < 1.05 * 128_000
    counts = [sum(u.client == name for u in arrived) for name in ("a", "b")]
    assert min(counts) > 0.7 * max(counts)
