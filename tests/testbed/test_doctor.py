"""The doctor tries rather than guesses, and each thing that is amiss comes with its fix."""

from __future__ import annotations

import os
import socketserver
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import docker
import pytest
import requests

from testbed.api import machine as doctor
from testbed.errors import HostError
from testbed.host import cpus, docker_engine, kernel
from tests.running import cli

LIMITS: dict[str, Any] = {
    "CgroupVersion": "2",
    "CpuCfsQuota": True,
    "CPUSet": True,
    "MemoryLimit": True,
    "PidsLimit": True,
    "SwapLimit": True,
}


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")


def test_checks_continue_without_an_engine(no_engine: None) -> None:
    findings = {finding.name: finding for finding in doctor.doctor()}
    assert findings["Docker engine"].status == "missing"
    assert findings["Docker engine"].fix is not None
    assert findings["Python"].status == "ok"


def test_fixes_are_printed_unwrapped(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (fix,) = (one.fix for one in doctor.doctor() if one.name == "Docker engine")
    assert fix is not None
    for columns in ("70", "400"):
        monkeypatch.setenv("COLUMNS", columns)
        assert fix in cli("doctor").stdout


def test_engine_that_does_not_answer_is_named(no_engine: None) -> None:
    assert not docker_engine.is_available()
    with pytest.raises(HostError, match=r"unix:///nonexistent/docker\.sock.*unset DOCKER_HOST"):
        docker_engine.connect()


def test_engine_connection_times_out_sooner_than_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Mock] = []

    def from_env(timeout: int) -> Mock:
        made.append(Mock(api=Mock(timeout=timeout)))
        assert timeout <= 30
        return made[-1]

    monkeypatch.setattr("docker.from_env", from_env)
    with docker_engine.connect_if_present() as client:
        assert [client] == made
        assert made[0].api.timeout >= 60
    made[0].close.assert_called_once()


def test_slow_engine_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's socket accepts a connection at once, and the answer comes after some seconds."""
    slow = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{slow}")
    answers = iter([2.5, 0.0, 0.0])
    with socketserver.ThreadingUnixStreamServer(str(slow), engine_that_answers(answers)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with docker_engine.connect_if_present() as client:
            assert client is not None
        server.shutdown()


def engine_that_answers(after: Iterator[float]) -> type[BaseHTTPRequestHandler]:
    """A handler of HTTP requests that answers each like an engine, `after` so many seconds."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(next(after, 0.0))
            body = b'{"ApiVersion": "1.44", "Version": "25.0"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return "unix"

        def log_message(self, *_: object) -> None: ...

    return Handler


def test_inaccessible_socket_is_fixed_by_group_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = PermissionError(13, "Permission denied")
    wrapped = requests.ConnectionError("Connection aborted.", refused)
    monkeypatch.setattr("docker.from_env", Mock(side_effect=wrapped))
    with pytest.raises(HostError, match=r"usermod -aG docker"):
        docker_engine.connect()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, "ok"),
        ({"CgroupVersion": "1"}, "ok"),
        ({"SwapLimit": False}, "warn"),
        ({"CpuCfsQuota": False}, "missing"),
        ({"MemoryLimit": False}, "missing"),
    ],
)
def test_ineffective_limits_are_found(change: dict[str, Any], status: str) -> None:
    finding = doctor.control_groups(LIMITS | change)
    assert finding.status == status
    assert (finding.fix is None) == (status == "ok")


@pytest.mark.timed  # others make interfaces, too
def test_kernel_feature_check_leaves_nothing() -> None:
    interfaces = set(Path("/sys/class/net").iterdir())
    for feature in kernel.FEATURES:
        works, answer = kernel.supports(feature)
        assert works or answer
    assert set(Path("/sys/class/net").iterdir()) == interfaces


@pytest.mark.parametrize("refused", ["unshare", "ip"])
@pytest.mark.parametrize("listed", [True, False])
def test_kernel_features_are_looked_up_for_ordinary_users(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, listed: bool
) -> None:
    """A user namespace that is refused, or has no rights in it, says nothing about the kernel."""
    programs = {"unshare": 'shift 2; exec "$@"', "ip": "exit 0", "tc": "exit 0"}
    programs[refused] = "echo 'Operation not permitted' >&2; exit 1"
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    release = tmp_path / os.uname().release
    release.mkdir()
    (release / "modules.builtin").write_text("kernel/net/sched/sch_fq.ko\n")
    module = "sch_netem" if listed else "sch_netem_other"
    (release / "modules.dep").write_text(f"kernel/net/sched/{module}.ko.xz: kernel/lib/x.ko\n")
    monkeypatch.setattr(kernel.is_listed, "__defaults__", (tmp_path,))
    works, answer = kernel.supports(kernel.NETEM)
    assert works is (True if listed else None)
    assert "Operation not permitted" in answer
    finding = doctor.traffic_control(kernel.NETEM)
    assert finding.status == ("ok" if listed else "warn")
    assert "Operation not permitted" in finding.detail


def test_missing_kernel_feature_is_reported() -> None:
    command = "tc qdisc add dev lo root absent"
    absent = kernel.Feature("sch_absent", command, "delay", needed=False, lacking="made by a router")
    finding = doctor.traffic_control(absent)
    assert finding.status == "warn"
    assert finding.detail.endswith("delay made by a router")
    assert finding.fix is not None


@pytest.mark.parametrize(
    ("allowed", "chosen", "status"),
    [("reno bbr cubic\n", "cubic", "ok"), ("reno bbr\n", "reno", "warn"), (None, None, "ok")],
)
def test_containers_use_cubic_if_available(
    allowed: str | None, chosen: str | None, status: str, tmp_path: Path
) -> None:
    file = tmp_path / "allowed"
    if allowed is not None:
        file.write_text(allowed)
    assert kernel.congestion_control(file) == chosen
    finding = doctor.tcp(chosen)
    assert (finding.status, finding.fix is None) == (status, status == "ok")


@pytest.mark.docker
def test_host_with_an_engine_passes(engine: docker.DockerClient) -> None:
    findings = {finding.name: finding for finding in doctor.doctor()}
    assert findings["Docker engine"].status == "ok"
    assert findings["control groups"].status == "ok"
    assert all(finding.fix for finding in findings.values() if finding.status == "missing")


def test_swarm_nodes_with_problems_are_reported() -> None:
    def node(name: str, version: str = "20.10.24", **changes: str) -> dict[str, Any]:
        return {
            "ID": f"id-{name}",
            "Description": {"Hostname": name, "Engine": {"EngineVersion": version}},
            "Status": {"State": changes.get("state", "ready")},
            "Spec": {"Availability": changes.get("availability", "active")},
        }

    def found(state: str, *nodes: dict[str, Any]) -> tuple[str, str, str | None]:
        info = {"Swarm": {"LocalNodeState": state, "NodeID": "me", "ControlAvailable": bool(nodes)}}
        told = doctor.swarm(info, nodes)
        return told.status, told.detail, told.fix

    assert found("inactive")[0] == "ok"
    assert found("active")[2] == "docker node promote me"
    assert found("active", node("a"), node("b", "28.2.2")) == (
        "ok",
        "2 nodes: a (20.10.24), b (28.2.2)",
        None,
    )
    drained = found("active", node("a"), node("b", availability="drain"))
    assert drained[0::2] == ("warn", "docker node update --availability active id-b")
    assert drained[1].endswith("1 of them accepts no work now")
    gone = found("active", node("a"), node("b", state="down"))
    assert gone[0::2] == ("warn", "sudo systemctl start docker (on these nodes)")
    assert gone[1].endswith("not reachable: b")
    assert found("active", node("a"), node("b", "19.03.5"))[0] == "missing"


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    """Folder of a host with two processors, one of them with a counter of its cores."""
    for zone, name, joules in (
        ("intel-rapl:0", "package-0", 5),
        ("intel-rapl:0:0", "core", 3),
        ("intel-rapl:1", "package-1", 90),
        ("intel-rapl:2", "psys", 200),
    ):
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(f"{name}\n")
        (tmp_path / zone / "energy_uj").write_text(f"{joules}000000\n")
        (tmp_path / zone / "max_energy_range_uj").write_text("100000000\n")
    return tmp_path


def test_energy_counters_of_processors_are_added_and_wrap(powercap: Path) -> None:
    meter = cpus.rapl_meter(powercap)
    assert meter is not None
    assert meter.joules() == 0.0
    (powercap / "intel-rapl:0" / "energy_uj").write_text("7500000\n")
    (powercap / "intel-rapl:1" / "energy_uj").write_text("4000000\n")
    assert meter.joules() == 2.5 + 14.0
    found = doctor.energy(cpus.rapl_survey(powercap))
    assert (found.status, found.detail.split(":")[0]) == ("ok", "package-0, package-1")


def test_energy_counter_that_may_not_be_read_is_reported(powercap: Path) -> None:
    (powercap / "intel-rapl:1" / "energy_uj").unlink()
    (powercap / "intel-rapl:1" / "energy_uj").mkdir()  # fails for root, too
    found = doctor.energy(cpus.rapl_survey(powercap))
    assert (found.status, "package-1" in found.detail) == ("warn", True)
    assert found.fix is not None
    assert cpus.rapl_meter(powercap) is None


def test_host_without_energy_counters_is_not_measured(tmp_path: Path) -> None:
    assert cpus.rapl_meter(tmp_path) is None
    assert "not measured" in doctor.energy(cpus.rapl_survey(tmp_path)).detail
