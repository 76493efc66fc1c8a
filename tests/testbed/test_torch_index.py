"""Which build of PyTorch pip takes: by driver, by the user's settings, by whether the index answers."""

from __future__ import annotations

import http.server
import os
import socket
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from testbed import installing
from testbed.errors import HostError
from testbed.images import wheels
from testbed.installing import TorchSource


@pytest.fixture(autouse=True)
def no_settings_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(installing, "_ANSWER_SECONDS", 120.0)  # this host may be busy


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of an index (PEP 503) that has the wheels of `folder/torch`."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def add_wheel(
    folder: Path, name: str, version: str, *requirements: str, files: dict[str, bytes] | None = None
) -> None:
    """Write the wheels of a version for both architectures."""
    folder.mkdir(parents=True, exist_ok=True)
    needs = "".join(f"Requires-Dist: {one}\n" for one in requirements)
    about = f"{name}-{version}.dist-info"
    for machine in ("x86_64", "aarch64"):
        path = folder / f"{name}-{version}-cp311-cp311-manylinux_2_28_{machine}.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
            )
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\n")
            for file, content in (files or {}).items():
                wheel.writestr(file, content)


def add_torch(folder: Path, version: str, *requirements: str) -> None:
    """Add the wheels of PyTorch to an index."""
    add_wheel(folder / "torch", "torch", version, *requirements)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_pip_prefers_the_cpu_build_of_the_added_index_to_the_same_version_with_cuda(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images' libraries are downloaded in this way, and set-up lets pip choose between the same two
    wheels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(wheels, "_installed_torch", lambda: None)
    (tmp_path / "testbed").mkdir()
    add_torch(tmp_path / "pypi", "2.13.0", "cuda-toolkit")
    add_torch(tmp_path / "cpu", "2.13.0+cpu")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("torch==2.13.0\n")
    with served(tmp_path / "pypi") as pypi, served(tmp_path / "cpu") as cpu:
        found = installing.cpu_source(cpu)
        assert found == TorchSource(("--extra-index-url", cpu), f"the CPU build, as {cpu} answers")
        both = TorchSource(("--index-url", pypi, *found.options), found.reason)
        monkeypatch.setattr(installing, "cpu_source", lambda: both)
        folder = wheels.fetch_wheels(requirements, machine, tmp_path, threading.Event())
    [wheel] = folder.iterdir()
    assert wheel.name == f"torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_{machine}.whl"


def test_index_that_refuses_or_lacks_torch_is_not_added(tmp_path: Path) -> None:
    with socket.socket() as deaf:  # bound, but it does not listen
        deaf.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        refused = installing.cpu_source(address)
    assert refused.options == ()
    assert "gigabytes of CUDA" in refused.reason
    assert f"{address}, does not answer ([Errno 111] Connection refused)" in refused.reason
    with served(tmp_path) as address:
        assert "does not answer (File not found)" in installing.cpu_source(address).reason


def test_silent_index_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "_ANSWER_SECONDS", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        problem = installing._problem(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert problem in ("nothing within 0.4 s", "timed out")


def test_hanging_name_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "_ANSWER_SECONDS", 0.4)
    answer = threading.Event()

    def hanging(*_: object, **__: object) -> object:
        answer.wait()
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    assert installing._problem("http://index.example") == "nothing within 0.4 s"
    answer.set()


def test_no_index_is_queried_with_an_nvidia_driver(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.touch()
    found = installing.source_for_host("http://index.example", [tmp_path / "other", driver])
    assert found.options == ()
    assert found.reason.endswith(f"with CUDA: NVIDIA driver found ({driver})")


def test_without_an_nvidia_driver_the_cpu_build_is_taken(tmp_path: Path) -> None:
    add_torch(tmp_path, "2.13.0+cpu")
    with served(tmp_path) as cpu:
        found = installing.source_for_host(cpu, [tmp_path / "version"])
    assert found.options == ("--extra-index-url", cpu)
    assert found.reason == f"the CPU build, as {cpu} answers; no NVIDIA driver found"


def test_no_index_is_queried_outside_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    found = installing.source_for_host("http://index.example", [])
    assert found == TorchSource((), "the Python Package Index's build, which has CUDA on Linux only")


def test_pip_settings_of_the_user_take_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings of the environment and of pip's files count; empty ones, and those of other options, do
    not."""
    with served(tmp_path / "cpu") as cpu:
        add_torch(tmp_path / "cpu", "2.13.0+cpu")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
        monkeypatch.setenv("PIP_TIMEOUT", "20")
        assert installing.cpu_source(cpu).options == ("--extra-index-url", cpu)
        settings = tmp_path / "pip.conf"
        settings.write_text("[install]\nextra-index-url = https://own.example\n    https://b.example\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        found = installing.cpu_source(cpu)
    assert found.options == ()
    assert "the source in your pip settings (PIP_NO_INDEX, install.extra-index-url);" in found.reason


def test_missing_cpu_build_for_images_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build came from an index that does not answer now."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(wheels, "_installed_torch", lambda: "2.13.0+cpu")
    monkeypatch.setattr(installing, "cpu_source", lambda: TorchSource(("--no-index",), "the reason"))
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("torch==2.13.0\n")
    with pytest.raises(HostError, match=r"(?s)torch==2\.13\.0\+cpu.*\nPyTorch: the reason"):
        wheels.fetch_wheels(requirements, "x86_64", tmp_path, threading.Event())
