"""The built wheel, installed in a separate environment without a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

import testbed as api
from testbed import broker, images
from tests.running import Finished, write_small_topology

pytestmark = pytest.mark.hosts
ROOT = Path(__file__).parents[1]
SOURCES = (
    *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"),
    *("testbed", "agents", "analysis", "images", "topologies"),
)
FOREIGN = "raise RuntimeError('another package of that name')\n"


@dataclass(frozen=True)
class Installed:
    """The wheel in an environment that has all else from the tests' own."""

    python: Path
    packages: Path
    folder: Path
    """Has nothing but a package `agents`, as the environment has another: neither is ours."""

    def run(self, *command: str | Path) -> str:
        """Return the output of `command`, a program of the environment; it must succeed."""
        unset = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONSAFEPATH")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        program, *arguments = map(str, command)
        done = subprocess.run(
            [str(self.python.parent / program), *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    source, environment, work = (folder / name for name in ("source", "environment", "work"))
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    (source / "COMMIT").write_text("0123abc+\n")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    build = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w"]
    subprocess.run([*build, str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "all-else.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if broker.AMQTT_FOLDER.is_dir():  # the broker of a host without Mosquitto
        place = environment / broker.AMQTT_FOLDER.relative_to(sys.prefix)
        place.parent.mkdir(parents=True)
        place.symlink_to(broker.AMQTT_FOLDER)
    for place in (packages, work):
        (place / "agents").mkdir(parents=True)
        (place / "agents" / "__init__.py").write_text(FOREIGN)
    return Installed(python, packages, work)


def test_wheel_installs_only_its_own_packages(installed: Installed) -> None:
    names = {path.name.partition("-")[0] for path in installed.packages.iterdir()}
    assert names - {"agents", "all", "__pycache__"} == {"testbed", "edge_fl_testbed"}
    assert not [*installed.packages.rglob("*conformance*")]  # another distribution


def test_wheel_reports_its_version(installed: Installed) -> None:
    (info,) = installed.packages.glob("edge_fl_testbed-*.dist-info")
    assert installed.run("testbed", "--version").split() == ["testbed", info.stem.split("-")[1]]


def test_wheel_has_the_image_tags_of_the_checkout(installed: Installed) -> None:
    """The tags are hashes of the Dockerfiles and of the code of the agents."""
    program = "from testbed import images as i; print(i.current_tags(i.FOLDER, i.AGENTS))"
    told = installed.run("python", "-c", program)
    assert told.strip() == str(images.current_tags(images.FOLDER, images.AGENTS))


def test_pack_gives_the_same_records_with_the_wheel(installed: Installed, tmp_path: Path) -> None:
    topology = ROOT / "topologies" / "theory" / "area-every.yaml"
    run = api.simulate(topology, runs=tmp_path / "runs", stop={"after": "10s"})
    pack = api.pack(run.path, tmp_path / "area.zip")
    said = installed.run("testbed", "up", pack.file, "--runs", tmp_path / "elsewhere")
    assert "byte for byte" in said


def test_examples_of_the_wheel_run_beside_a_foreign_agents_package(installed: Installed) -> None:
    """The folder has a foreign package `agents`; processes and the notebook import the wheel's own."""
    assert "testbed up examples/topologies/quickstart.yaml" in installed.run(
        "testbed", "new", "examples"
    )
    options = ("--runtime", "process", "--oversubscribe")
    planned = installed.run("testbed", "plan", "examples/topologies/quickstart.yaml", *options)
    assert "process: 6 devices ask for" in planned
    topology = write_small_topology(installed.folder, stop={"updates": 2})
    installed.run("testbed", "up", topology, *options)
    ran = Finished.only_one_in(installed.folder / "runs")
    assert len(ran.updates) >= 2
    assert ran.manifest["git_commit"] == "0123abc+"
    notebook = installed.folder / "examples" / "notebooks" / "1-first-look.ipynb"
    installed.run("python", "-m", "IPython", "--no-banner", notebook)
    assert list(installed.folder.glob("**/runs/first-look-*/manifest.json"))
