"""Effects of a scenario on the links of local processes, which relays make."""

from __future__ import annotations

import json

import pytest

from tests.running import Finished, cli, left_as_processes, write_topology
from tests.test_scenario_runs import FAR, sent

pytestmark = pytest.mark.timed


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
            {"name": "cut", "cpu": 0.2, "timing": "200ms", "link": {"rtt": "20ms"}},
            {
                "name": "bus",
                "cpu": 0.2,
                "timing": "200ms",
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
    assert sent(linked, device, 0, begin)
    assert not [u for u in linked.updates if u.client == device and begin + 0.2 < u.arrived < end]
    assert sent(linked, device, end, 10)


def test_changed_relay_takes_effect(linked: Finished) -> None:
    """As for containers in `test_scenario_runs`."""
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
