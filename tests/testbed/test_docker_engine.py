"""Which engine is used, and which cannot run devices.

`engines/` has what real engines said of themselves (`docker version`, `docker info`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import socket
import socketserver
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from unittest.mock import Mock

import docker
import pytest
import requests

from testbed.api import machine as doctor
from testbed.errors import HostError
from testbed.host import docker_engine, kernel
from testbed.runtimes.docker import executor
from tests.conftest import unavailable
from tests.running import Testbed, write_small_topology
from tests.waiting import eventually

ENGINES = Path(__file__).with_name("engines")
PODMAN = "podman-5.8.6"
HERE = {"KernelVersion": platform.release(), "Name": socket.gethostname()}


def info_of(engine: str, **changes: object) -> dict[str, Any]:
    """Recorded description of a real engine, as if it ran on this machine."""
    info: dict[str, Any] = json.loads((ENGINES / f"{engine}.json").read_text())["info"]
    return {**info, **HERE, **changes}


class Recorded(BaseHTTPRequestHandler):
    """Answers as a real engine did, and keeps what it was asked."""

    answers: ClassVar[dict[str, Any]] = {}
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.requestline)
        body = json.dumps(self.answers[self.path.rpartition("/")[2]]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "a Unix socket"

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def recorded(engine: str, server: socketserver.TCPServer, **changes: object) -> Iterator[list[str]]:
    """Have `server` answer as `engine`; the requests that it gets."""
    version = json.loads((ENGINES / f"{engine}.json").read_text())["version"]
    Recorded.answers = {"version": version, "info": info_of(engine, **changes), "nodes": []}
    Recorded.asked.clear()
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield Recorded.asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, as that of a Unix socket has at most 107 characters."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def listening(folder: Path) -> socketserver.UnixStreamServer:
    return socketserver.UnixStreamServer(str(folder / "engine.sock"), Recorded)


@pytest.fixture
def contexts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of Docker's configuration."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    return folder


def make_context(configuration: Path, name: str, url: str, *, use: bool) -> None:
    """Do the same as `docker context create`, and with `use` as `docker context use`."""
    meta = configuration / "contexts/meta" / hashlib.sha256(name.encode()).hexdigest()
    meta.mkdir(parents=True)
    endpoint = {"Host": url, "SkipTLSVerify": False}
    content = {"Name": name, "Metadata": {}, "Endpoints": {"docker": endpoint}}
    (meta / "meta.json").write_text(json.dumps(content))
    current = {"currentContext": name} if use else {}
    (configuration / "config.json").write_text(json.dumps(current))


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("docker-20.10.24", None),
        ("docker-28.5.2", None),
        ("docker-20.10.24-rootless", "runs rootless"),
        ("docker-20.10.24-userns", "runs with userns-remap"),
        ("podman-4.3.1", "is Podman"),
        ("podman-4.3.1-rootless", "is Podman"),
        ("podman-5.8.6", "is Podman"),
    ],
)
def test_kinds_of_engines_are_recognised(engine: str, reason: str | None) -> None:
    found = docker_engine.unfit_reason(info_of(engine))
    finding = doctor.engine(info_of(engine, DockerRootDir="/"))
    if reason is None:
        assert found is None
        assert finding.status == "ok"
    else:
        assert found is not None
        assert reason in found.reason
        assert (finding.status, finding.fix) == ("missing", found.fix)
        assert found.reason in finding.detail


def test_refused_engine_leaves_nothing_and_is_shown_by_plan(
    testbed: Testbed,
    listening: socketserver.UnixStreamServer,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/engine.sock")
    topology, runs = write_small_topology(tmp_path), tmp_path / "runs"
    study = tmp_path / "study.yaml"
    study.write_text(f"topology: {topology}\ngrid: {{seed: [1, 2]}}\n")
    with recorded(PODMAN, listening) as asked:
        assert testbed("validate", topology).code == 0
        assert asked == []
        said = testbed("plan", topology, "--runtime", "docker")
        assert said.code == 0
        assert "`testbed up` would refuse it on this host: the engine is Podman" in said.out
        refused = [
            testbed("up", topology, "--runtime", "docker", "--runs", runs),
            testbed("up", topology, "--runtime", "docker", "--runs", runs, "--detach"),
            testbed("calibrate", "--fidelity", "--runtime", "docker", "--runs", runs),
        ]
        swept = testbed("sweep", study, "--runtime", "docker", "--runs", tmp_path / "swept")
    for said in (*refused, swept):
        assert said.code == HostError.exit_code
        assert re.search(r"error: the engine is Podman.*docker\.io.*--runtime process", said.err)
    assert {request.split()[0] for request in asked} == {"GET"}
    assert not runs.exists()
    assert [path.name for path in (tmp_path / "swept/study").iterdir()] == [".lock"]


def test_real_podman_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("podman") is None or os.geteuid() != 0:
        unavailable("podman", "its program is not installed, or this user is not root")
    address = f"unix://{folder}/podman.sock"
    folders = [f"--{name}={folder / name}" for name in ("root", "runroot", "tmpdir")]
    own = ["--storage-driver=vfs", *folders]
    monkeypatch.setenv("DOCKER_HOST", address)
    service = subprocess.Popen(["podman", *own, "system", "service", "--time=0", address])
    try:
        eventually(lambda: (folder / "podman.sock").exists())
        with closing(docker_engine.connect()) as client:
            unfit = docker_engine.unfit_reason(client.info())
    finally:
        service.terminate()
        service.wait()
    assert unfit is not None
    assert "Podman" in unfit.reason


@pytest.mark.parametrize("release", ["6.10.14-linuxkit", "5.15.167.4-microsoft-standard-WSL2"])
def test_engine_on_another_kernel_is_refused(release: str) -> None:
    found = docker_engine.unfit_reason(info_of("docker-28.5.2", KernelVersion=release))
    assert found is not None
    assert f"its kernel is {release}, the one here {platform.release()}" in found.reason


@pytest.mark.parametrize(
    ("own", "engines"),
    [("6.8-rc1", "6.8.0-rc1"), ("6.16+deb14-amd64", "6.16.0+deb14-amd64"), ("6.1.0-42", "6.1.0-42")],
)
def test_kernel_releases_are_compared_with_three_numbers(
    own: str, engines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.release", lambda: own)
    assert docker_engine.unfit_reason(info_of("docker-28.5.2", KernelVersion=engines)) is None


@pytest.mark.parametrize(("name", "fits"), [(socket.gethostname(), True), ("twin", False)])
def test_engine_of_another_machine_with_the_same_kernel_is_refused(
    name: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = socketserver.TCPServer(("127.0.0.1", 0), Recorded)
    monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_address[1]}")
    with recorded("docker-28.5.2", server, Name=name):
        assert docker_engine.is_available() is fits
        with closing(docker_engine.connect()) as client:
            found = docker_engine.unfit_reason(client.info())
    assert fits or (found is not None and "another machine (twin, at tcp://127.0.0.1" in found.reason)


def test_engine_that_sees_other_files_gives_a_warning(tmp_path: Path) -> None:
    info = info_of("docker-28.5.2", DockerRootDir=str(tmp_path))
    assert doctor.engine(info).status == "ok"
    info["DockerRootDir"] += "/not-here"
    finding = doctor.engine(info)
    assert finding.status == "warn"
    assert "it sees other files" in finding.detail


@pytest.mark.parametrize("by_variable", [True, False])
def test_docker_context_selects_its_engine(
    by_variable: bool,
    listening: socketserver.UnixStreamServer,
    contexts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_context(contexts, "lab", f"unix://{contexts}/engine.sock", use=not by_variable)
    if by_variable:
        monkeypatch.setenv("DOCKER_CONTEXT", "lab")
    with (
        recorded("docker-28.5.2", listening, Name="engine of the context") as asked,
        closing(docker_engine.connect()) as client,
    ):
        assert client.info()["Name"] == "engine of the context"
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("by_variable", "fix"), [(True, "unset DOCKER_CONTEXT"), (False, "docker context use default")]
)
def test_context_of_an_unreachable_engine_is_named(
    by_variable: bool, fix: str, contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_context(contexts, "lab", "unix:///nonexistent.sock", use=not by_variable)
    if by_variable:
        monkeypatch.setenv("DOCKER_CONTEXT", "lab")
    expected = "at unix:///nonexistent.sock, which the Docker context lab names"
    with pytest.raises(HostError, match=f"{re.escape(expected)}.*{fix}"):
        docker_engine.connect()
    (finding,) = (one for one in doctor.doctor() if one.name == "Docker engine")
    assert expected in finding.detail
    assert fix in str(finding.fix)


def test_missing_context_is_an_error(contexts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK would silently use the local engine."""
    monkeypatch.setenv("DOCKER_CONTEXT", "lab")
    with pytest.raises(HostError, match=r"There is no Docker context lab.*docker context use NAME"):
        docker_engine.connect()
    assert not docker_engine.is_available()
    make_context(contexts, "lab", "unix:///nonexistent.sock", use=False)
    for meta in contexts.rglob("meta.json"):
        meta.write_text("{")
    with pytest.raises(HostError, match="The Docker context lab cannot be read"):
        docker_engine.connect()


def test_docker_host_takes_precedence_over_the_context(
    listening: socketserver.UnixStreamServer, contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_context(contexts, "lab", "unix:///nonexistent.sock", use=True)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{contexts}/engine.sock")
    with recorded("docker-28.5.2", listening):
        assert docker_engine.is_available()


@pytest.mark.parametrize(
    ("capabilities", "held"),
    [("000001ffffffffff", True), ("00000000a80425fb", False), ("0000000000001000", True)],
)
def test_network_capability_is_read_from_the_process_status(
    capabilities: str, held: bool, tmp_path: Path
) -> None:
    """The second has Docker's default capabilities."""
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapPrm:\t{'f' * 16}\nCapEff:\t{capabilities}\n")
    assert kernel.may_change_networks(status) is held


@pytest.mark.docker
def test_files_invisible_to_the_engine_are_named(engine: docker.DockerClient) -> None:
    mount = docker.types.Mount("/x", "/nonexistent/run/work", "bind")
    with (
        pytest.raises(HostError, match=r"sees other files .*: /nonexistent/run/work does not exist"),
        executor.as_host_error("start the containers"),
    ):
        engine.containers.create("testbed-none", mounts=[mount])


@pytest.mark.parametrize("silences", [3, 4])
def test_removal_waits_for_a_slow_engine(silences: int) -> None:
    """On a slow host one removal takes longer than a request's timeout; the engine continues with it."""
    calls = iter([requests.ReadTimeout("read timed out")] * silences)

    def remove(*_: object, **__: object) -> None:
        if (error := next(calls, None)) is not None:
            raise error
        there.clear()

    there = [{"Id": "1", "Labels": {}}]
    api = Mock(containers=lambda **_: list(there), remove_container=remove)
    with pytest.raises(requests.ReadTimeout) if silences > 3 else nullcontext():
        executor.remove_containers(Mock(api=api), "r")
    assert bool(there) == (silences > 3)
