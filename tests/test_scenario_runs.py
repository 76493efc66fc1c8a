"""What a scenario, and a user's hand, do to the devices of a real run, and what the run says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import docker
import pytest
from safetensors.numpy import load_file

from agents import events
from tests.running import (
    TOPOLOGIES,
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
    )
    done = cli("up", topology, "--runtime", "docker", "--runs", folder / "runs", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "at worst" in done.stdout
    return Finished.only_one_in(folder / "runs")


def _sent(run: Finished, device: str, begin: float, end: float) -> list[float]:
    """When `device` sent the updates of that time that arrived then."""
    return [u.sent for u in run.updates if u.client == device and begin < u.sent and u.arrived < end]


@pytest.mark.docker
def test_every_action_is_told_with_its_lateness(played: Finished) -> None:
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
def test_a_device_works_but_while_it_is_away(
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
def test_a_changed_link_is_the_link_from_there_on(played: Finished) -> None:
    """2.6 kB, a packet of it in the bucket, at 256 kbit/s and 150 ms; then at 2 Mbit/s and 10 ms."""
    took = {u.sent: u.arrived - u.sent for u in played.updates if u.client == "far"}
    slow = [seconds for sent, seconds in took.items() if sent < 3]
    quick = [seconds for sent, seconds in took.items() if 5 < sent < 7]
    assert min(slow) > 0.18
    assert min(quick) < 0.15


@pytest.mark.docker
def test_the_run_says_what_the_devices_got(played: Finished) -> None:
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
def test_nothing_is_left(played: Finished, engine: docker.DockerClient) -> None:
    assert left_in_docker(engine) == []


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
def test_nothing_passes_a_relay_that_is_cut(
    linked: Finished, device: str, begin: float, end: float
) -> None:
    assert _sent(linked, device, 0, begin)
    assert not [u for u in linked.updates if u.client == device and begin + 0.2 < u.arrived < end]
    assert _sent(linked, device, end, 10)


def test_a_changed_relay_is_the_link_from_there_on(linked: Finished) -> None:
    """As above."""
    took = {u.sent: u.arrived - u.sent for u in linked.updates if u.client == "far"}
    assert min(seconds for sent, seconds in took.items() if sent < 3) > 0.18
    assert min(seconds for sent, seconds in took.items() if sent > 5) < 0.15


def test_relays_are_as_asked(linked: Finished) -> None:
    assert linked.manifest["shaper"] == "relay"
    devices = json.loads((linked.path / "fidelity.json").read_text())["devices"]
    assert all(abs(devices["far"][name]["error"]) < 6 for name in ("up", "down", "rtt")), devices["far"]
    for one in ("a", "b"):
        assert devices[one]["up"]["asked"] == 128_000
        assert abs(devices[one]["up"]["error"]) < 6, devices[one]


def test_relays_count_what_devices_send_and_receive(linked: Finished) -> None:
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


@pytest.mark.together
def test_a_users_hand_in_a_run_of_processes(testbed: Testbed, tmp_path: Path) -> None:
    topology = write_topology(
        tmp_path,
        task={"name": "digits-logreg", "local": {"steps": 5, "lr": 0.01}},
        devices=[{"name": "a", "cpu": 0.3}, {"name": "b", "cpu": 0.3, "link": {"rtt": "10ms"}}],
        rule={"name": "fedbuff", "buffer_size": 1},
        stop={"after": "60s"},
    )
    runs = tmp_path / "runs"
    with started("up", topology, "--runtime", "process", "--runs", runs) as up:
        until_printed(up, "the run clock starts")
        (run,) = runs.iterdir()
        for command in (
            "set {} a --cpu 0.1",
            "set {} a --up 12mbit",
            "pause {} b",
            "resume {} b",
            "kill {} b",
            "restart {} b",
        ):
            done = testbed(*command.format(run).split(), "--runs", runs)
            assert done.code == 0, done.err
        for command, told in (
            ("kill {} c", "has no device c; it has a, b"),
            ("set {} a", "nothing to set: give --cpu, --up, --down, --rtt, --jitter or --loss"),
            ("set {} a --cpu 0", "--cpu 0: expected a positive share of one host core such as 0.25"),
            ("set {} a --cpu 64", "a cannot have 64 cpu: the devices would ask for 64.3 cores"),
            ("set {} a --up 12", "--up 12: expected a rate"),
            ("set {} a --up 12mbit --loss 1%", "loses no packets: use the docker runtime"),
            ("kill nowhere a", "no run nowhere"),
            ("shell {} a", "ran in the process runtime, whose devices are no containers"),
        ):
            refused = testbed(*command.format(run).split(), "--runs", runs)
            assert (refused.code, refused.out) == (2, "")
            assert told in refused.err
        until_printed(up, "online: b")
        interrupt(up)
    ended = Finished.only_one_in(runs)
    acted = [record for record in ended.records if isinstance(record, events.Acted)]
    assert [(a.device, a.details["action"], a.source) for a in acted] == [
        ("a", "set", "hand"),
        ("a", "set", "hand"),
        ("b", "pause", "hand"),
        ("b", "resume", "hand"),
        ("b", "crash", "hand"),
        ("b", "restart", "hand"),
    ]
    assert left_as_processes(run.name) == []
    over = testbed("kill", run, "a", "--runs", runs)
    assert (over.code, over.out) == (2, "")
    assert "is not running" in over.err


@pytest.mark.together
def test_areas_mean_holds_through_crash_outage_and_churn(tmp_path: Path) -> None:
    """A step that was lost, or counted twice, would be in x + u, and so in where it ends, for ever."""
    done = cli("up", TOPOLOGIES / "faults.yaml", "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    run = Finished.only_one_in(tmp_path / "runs")
    acted = [r.details["action"] for r in run.records if isinstance(r, events.Acted)]
    assert {"crash", "restart", "disconnect", "reconnect", "set"} == set(acted)
    assert acted.count("crash") > 1  # churn's
    assert f"Scenario: {len(acted)} steps done, at most" in done.stdout
    (w,) = load_file(run.path / "models" / "final.safetensors").values()
    assert float(w[0]) == pytest.approx(3.0, abs=0.05)


@pytest.mark.together
def test_who_leaves_takes_its_memory_out_of_areas_mean(tmp_path: Path) -> None:
    """Started again, it is not listened to any more."""
    topology = write_topology(
        tmp_path,
        task={"name": "quadratic", "centers": [[0.0], [3.0], [9.0]], "local": {"steps": 1, "lr": 0.3}},
        rule={"name": "area", "criterion": "every", "every": 2},
        devices=[{"name": name, "cpu": 0.2, "timing": "100ms"} for name in ("left", "middle", "right")],
        scenario=[{"at": "2s", "leave": "right"}],
        evaluate={"every": "2s"},
        stop={"after": "6s"},
    )
    done = cli("up", topology, "--runtime", "process", "--runs", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    run = Finished.only_one_in(tmp_path / "runs")
    notes = [record.message for record in run.records if isinstance(record, events.Note)]
    assert any(note.startswith("right retired: its model is out of the mean") for note in notes), notes
    (w,) = load_file(run.path / "models" / "final.safetensors").values()
    assert float(w[0]) == pytest.approx(1.5, abs=0.05)  # the mean of those who stayed
