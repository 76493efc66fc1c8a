"""Runs whose links are wrong beside other work: measured again, and refused if they stay wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import psutil
import pytest

from agents.config import AccessLink
from agents.device_actions import SetLink
from agents.mqtt.topics import ROUTER
from agents.wire.messages import DeviceOrder, encode
from testbed.fidelity import host_load
from testbed.fidelity.host_load import OtherWork
from testbed.plan import PlannedDevice
from testbed.run import inputs
from testbed.run.controller import Controller
from testbed.run.host_watch import HostWatch
from testbed.runtimes.process.runtime import ProcessRuntime
from tests.running import Finished, Testbed, left_as_processes, left_in_docker, write_topology
from tests.testbed.test_repetition import stranger
from tests.waiting import eventually

pytestmark = pytest.mark.timed

__all__ = ["stranger"]
RATE = 1_000_000
RUNTIMES = [pytest.param("docker", marks=pytest.mark.docker), "process"]


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A runtime in which links get half of their rate, beside a busy stranger."""
    wanted = property(lambda device: device.link)
    monkeypatch.setattr(PlannedDevice, "host_probed", wanted)
    monkeypatch.setattr(PlannedDevice, "host_link", property(lambda _: AccessLink(up=RATE // 2)))
    monkeypatch.setattr(host_load, "PAUSES", (0.5, 0.5))
    monkeypatch.setattr(host_load, "_NAMED", 50)
    request.getfixturevalue("stranger")
    yield request.param
    if request.param == "docker":
        return


def topology(folder: Path) -> Path:
    return write_topology(
        folder,
        task={"name": "digits-logreg", "local": {"steps": 5, "lr": 0.01}},
        devices=[{"name": "far", "cpu": 0.1, "link": {"up": "1mbit"}}],
        stop={"after": "3s"},
    )


def probes(run: Path) -> list[float]:
    lines = map(json.loads, (run / "telemetry.jsonl").read_text().splitlines())
    return [line["probe"]["up"] for line in lines if "probe" in line]


def left(runtime: str, run: str, request: pytest.FixtureRequest) -> list[Any]:
    if runtime == "process":
        return [*left_as_processes(run)]
    engine: docker.DockerClient = request.getfixturevalue("engine")
    return [*left_in_docker(engine, run)]


def test_link_that_is_right_at_the_second_time_starts_the_run(
    runtime: str,
    testbed: Testbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    original = Controller._carry_out

    def mended(self: Controller, action: inputs.ControllerAction) -> None:
        if isinstance(action, inputs.MeasureAgain):
            mend(self)
        original(self, action)

    def mend(self: Controller) -> None:
        target = "far" if runtime == "docker" else ROUTER
        assert self._connection is not None
        order = encode(DeviceOrder("far", SetLink({"up": RATE})))
        self._connection.publish(self.core.run.topics.control(target), order)
        if isinstance(self._runtime, ProcessRuntime):
            # The relay gets no order to measure after this one.
            relay = self._runtime._relay
            assert relay is not None
            eventually(lambda: (relay.measure(["far"])[0].probe.up or 0.0) > 0.75 * RATE)

    monkeypatch.setattr(Controller, "_carry_out", mended)
    done = testbed("up", topology(tmp_path), "--runtime", runtime, "--runs", tmp_path / "runs")
    assert done.code == 0, done
    again = r"Measuring 1 link again: the host is busy \(others use [0-9.]+ of \d+ cores: .*\d\)"
    assert re.search(again, done.out), done
    run = Finished.only_one_in(tmp_path / "runs")
    first, last = probes(run.path)
    assert first == pytest.approx(RATE / 2, rel=0.1)
    assert last == pytest.approx(RATE, rel=0.1)
    figures = json.loads((run.path / "fidelity.json").read_text())["devices"]["far"]
    assert figures["up"]["got"] == float(f"{last:.6g}")  # fidelity.json has six digits
    assert figures["probes"] == 1
    assert "wrong_limits" not in figures
    events = (run.path / "events.jsonl").read_text()
    assert "measured 1 link again: the host is busy" in events
    assert left(runtime, run.path.name, request) == []


def test_link_that_stays_wrong_is_refused_with_who_was_busy(
    runtime: str,
    testbed: Testbed,
    stranger: psutil.Process,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    done = testbed("up", topology(tmp_path), "--runtime", runtime, "--runs", tmp_path / "runs")
    assert done.code == 1, done
    said = re.sub(r"\s+", " ", done.err + done.out)
    assert re.search(r"the uplink of far was \d\d\.\d% less than requested", said), said
    assert re.search(r"in 3 measurements \(others use [0-9.]+ of \d+ cores: ", said), said
    assert f"sh ({stranger.pid}) " in said
    (run,) = (tmp_path / "runs").iterdir()
    assert len(probes(run)) == 3
    assert left(runtime, run.name, request) == []


@pytest.mark.parametrize("kind", RUNTIMES)
def test_only_the_wrong_segment_is_measured_again(
    kind: str,
    testbed: Testbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The devices are connected through it by then. That it was wrong is planted."""
    found = [["cell"]]
    monkeypatch.setattr("testbed.run.controller.wrong_segments", lambda _: found.pop() if found else [])
    monkeypatch.setattr(HostWatch, "other_work", lambda _: [OtherWork("others are busy", True)])
    monkeypatch.setattr(host_load, "PAUSES", (0.5,))
    topology = write_topology(
        tmp_path,
        task={"name": "digits-logreg", "local": {"steps": 5, "lr": 0.01}},
        network={"backhaul": {"up": "4mbit"}, "cell": {"parent": "backhaul", "up": "1mbit"}},
        devices=[{"name": "far", "count": 2, "cpu": 0.1, "segment": "cell"}],
        stop={"after": "3s"},
    )
    done = testbed("up", topology, "--runtime", kind, "--runs", tmp_path / "runs")
    assert done.code == 0, done
    run = Finished.only_one_in(tmp_path / "runs")
    lines = map(json.loads, (run.path / "telemetry.jsonl").read_text().splitlines())
    measured = [one["segments"] for one in lines if "segments" in one and "seconds" not in one]
    assert [[each["segment"] for each in one] for one in measured] == [["backhaul", "cell"], ["cell"]]
    assert {update.client for update in run.updates} == {"far-1", "far-2"}
    assert measured[1][0]["together"] == pytest.approx(RATE, rel=0.1)
    assert left(kind, run.path.name, request) == []
