"""The conformance kit's wheel in an environment with NumPy and PyYAML, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.hosts
KIT = Path(__file__).parents[2] / "conformance"
NEEDED = ("numpy", "numpy.libs", "yaml", "_yaml")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit")
    source, made, packages = (folder / name for name in ("source", "environment", "packages"))
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(KIT, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    build = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w"]
    subprocess.run([*build, folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    python = made / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    packages.mkdir()
    for name in NEEDED:
        place = Path(np.__file__).parents[1] / name
        if place.exists():
            (packages / name).symlink_to(place)
    (site,) = made.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text(f"{packages}\n")
    return made


def run(environment: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = command
    variables = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(environment / "bin" / program), *arguments],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_wheel_has_the_kit_alone(environment: Path) -> None:
    (site,) = environment.glob("lib/python*/site-packages")
    names = {path.name.partition("-")[0] for path in site.iterdir()} - {"needed.pth", "__pycache__"}
    assert names == {"fl_conformance", "edge_fl_conformance"}
    assert [*site.glob("edge_fl_conformance-*/licenses/LICENSE")]


def test_command_checks_a_module_of_the_users_folder(environment: Path, tmp_path: Path) -> None:
    shutil.copy(KIT / "tests" / "naive.py", tmp_path)
    done = run(environment, tmp_path, "fl-conformance", "naive:Naive", "--rule", "fedbuff")
    assert (done.returncode, done.stderr) == (0, "")
    assert "7 scenarios: " in done.stdout
    done = run(environment, tmp_path, "fl-conformance", "naive:Participants", "--rule", "fedbuff")
    assert (done.returncode, "by the number of clients, not" in done.stdout) == (1, True)


def test_module_has_the_scenarios_of_all_rules(environment: Path, tmp_path: Path) -> None:
    adapter = "fl_conformance.reference:Reference"
    done = run(environment, tmp_path, "python", "-m", "fl_conformance", adapter)
    assert (done.returncode, done.stderr) == (0, "")


def test_wrong_input_is_an_error_without_traceback(environment: Path, tmp_path: Path) -> None:
    done = run(environment, tmp_path, "fl-conformance", "naive:Naive", "--rule", "none")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --rule none: unknown rule, expected all, area,")
    assert "Traceback" not in done.stderr


def test_version_is_that_of_the_package(environment: Path, tmp_path: Path) -> None:
    (site,) = environment.glob("lib/python*/site-packages")
    (info,) = site.glob("edge_fl_conformance-*.dist-info")
    done = run(environment, tmp_path, "fl-conformance", "--version")
    assert done.stdout.startswith(f"fl-conformance {info.stem.partition('-')[2]}, scenarios of format ")
