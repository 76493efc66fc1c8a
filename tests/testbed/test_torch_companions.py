"""Packages beside PyTorch, as pip finds them: the version and build that fit the images' PyTorch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement

from testbed import images, installing
from testbed.errors import BadInputError
from testbed.images import wheels
from testbed.images.building import Builder, BuildTime
from testbed.installing import TorchSource
from testbed.run import preparing
from testbed.topology import parse
from tests.testbed.test_torch_index import add_wheel, served
from tests.testbed.test_torch_index import no_settings_of_pip as _no_settings  # noqa: F401

CUDA = {"torchvision/_C.so": b"\0libc10_cuda.so\0libtorch_cuda.so\0"}


@contextlib.contextmanager
def indexes(folder: Path, monkeypatch: pytest.MonkeyPatch, *, cpu_builds: bool = True) -> Iterator[Path]:
    """Two indexes with builds of torchvision, and a package that needs an old PyTorch. Yields the folder
    with the wheels of the agents' image."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    (folder / "testbed").mkdir()
    pypi, cpu, ours = folder / "pypi", folder / "cpu", folder / "ours"
    for torch, vision in (("2.13.0", "0.28.0"), ("2.14.1", "0.29.1")):
        add_wheel(pypi / "torchvision", "torchvision", vision, f"torch=={torch}", files=CUDA)
        add_wheel(pypi / "torch", "torch", torch)
        add_wheel(cpu / "torchvision", "torchvision", f"{vision}+cpu", f"torch=={torch}")
    add_wheel(pypi / "old", "old", "1.0", "torch<2.9")
    add_wheel(ours, "torch", "2.13.0+cpu")
    with served(pypi) as all_builds, served(cpu) as only_cpu:
        added = ("--extra-index-url", only_cpu) if cpu_builds else ()
        source = TorchSource(("--index-url", all_builds, *added), "the reason")
        monkeypatch.setattr(installing, "cpu_source", lambda: source)
        yield ours


def fetch(requirement: str, ours: Path, folder: Path) -> list[str]:
    """Return the names of the wheels that `requirement` adds to the image."""
    found = wheels.fetch_more_wheels([requirement], ours, "x86_64", folder, threading.Event())
    return sorted(wheel.name for wheel in found.iterdir())


def test_torchvision_comes_in_the_version_and_build_of_the_images_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with indexes(tmp_path, monkeypatch) as ours:
        found = fetch("torchvision", ours, tmp_path)
    assert found == ["torchvision-0.28.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"]


def test_wheels_for_another_pytorch_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with indexes(tmp_path, monkeypatch, cpu_builds=False) as ours:
        with pytest.raises(BadInputError, match=r"torchvision 0\.28\.0, a build for CUDA") as refused:
            fetch("torchvision", ours, tmp_path)
        assert "torch==2.13.0+cpu" in str(refused.value)
        assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" in str(refused.value)
        with pytest.raises(BadInputError, match=r"which has torch==2\.13\.0\+cpu"):
            fetch("old", ours, tmp_path)


@pytest.mark.parametrize(
    ("requirement", "instead"),
    [
        ("torch==2.8.0", "write torch, without a version"),
        ("torch @ https://example.org/torch-2.13.0-py3-none-any.whl", "write torch, without a version"),
        ("torchvision==0.23.0", "write torchvision, or torchvision==0.28.0"),
        ("torchaudio<2.9", "write torchaudio, or torchaudio=="),
    ],
)
@pytest.mark.parametrize("installed", [True, False])
def test_requirement_for_another_pytorch_is_refused_in_every_runtime(
    requirement: str, instead: str, installed: bool
) -> None:
    topology = parse(f"""
name: t
code: {Path(__file__).parents[1] / "flower_app"}
requirements: ['{requirement}']
task: {{name: digits-logreg, local: {{steps: 1}}}}
rule: {{name: fedavg}}
devices: [{{name: d, cpu: 0.1}}]
stop: {{after: 10s}}
""")
    with pytest.raises(BadInputError, match=r"requirements\[0\]") as refused:
        preparing.check_requirements(topology, installed=installed)
    assert instead in str(refused.value)


def test_requirements_that_fit_the_pinned_pytorch_are_accepted() -> None:
    for text in ("torch", "torch>=2.8", "torchvision", "torchvision>=0.20,<0.29", "torchaudio", "scipy"):
        assert wheels.companions_refusal(Requirement(text)) is None


def test_pinned_torchvision_is_the_one_of_the_pinned_torch() -> None:
    """Since 2.0, torch 2.N goes with torchvision 0.(N + 15)."""
    pins = wheels.pinned_versions()
    torch, vision = (pins[name].split(".") for name in ("torch", "torchvision"))
    assert int(vision[1]) == int(torch[1]) + 15
    assert vision[2] == torch[2]


def test_command_to_install_torchvision_keeps_the_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "_installed_torch", lambda: "2.13.0+cpu")
    command = wheels.companions_command("torchvision>=0.20")
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in command
    assert command.endswith(f"'torchvision=={wheels.pinned_versions()['torchvision']}'")
    assert wheels.companions_command("scipy>=1.11").endswith("-m pip install 'scipy>=1.11'")


def test_requirements_are_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Path:
        raise BadInputError("requirements: no")

    kinds = {"base", "libraries", "agent", "requirements", "code"}
    client = Mock(version=lambda: {"Arch": "amd64"})
    monkeypatch.setattr(Builder, "_fetch_own_wheels", refuse)
    monkeypatch.setattr(Builder, "_libraries_context", lambda *_: tmp_path)
    added = images.ImageAdditions("code", "digest", Mock(), ("torchvision",))
    tags = dict.fromkeys(kinds, "tag:1")
    builder = Builder(client, tags, tmp_path, lambda _: None, BuildTime(kinds), added)
    with pytest.raises(BadInputError, match="requirements: no"):
        builder.build(kinds)
    assert not client.api.mock_calls
