"""Optional packages: none is imported before it is needed, and the error about a missing one names its
extra."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agents.extras import EXTRAS
from testbed.api import machine
from tests.running import Testbed, write_small_topology

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Modules that are there for an optional package alone, and one that starts when it is imported.
THEIRS = {
    "agents.tasks.flower_module",
    "testbed.__main__",
    "testbed.broker.embedded",
    "testbed.sweeps.clusters.dask",
    "testbed.sweeps.clusters.slurm",
    "testbed.tracking.mlflow",
    "testbed.tracking.tensorboard",
    "testbed.tracking.wandb",
}
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
import testbed, agents, analysis
for package in (agents, analysis, testbed):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if found.name not in sys.argv[2].split(",") and not found.name.endswith(".__main__"):
            importlib.import_module(found.name)
"""

HUB: dict[str, Any] = {"data": {"hub": "a/b", "input": "image", "label": "label"}}
NOISE = {"differential": {"clip": 1.0, "noise": 1.0, "delta": 1e-5, "at": "client"}}
LOCAL = {"steps": 2, "lr": 0.1}
DIGITS = {"name": "digits-logreg", "local": LOCAL}
NEEDED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "datasets": (["data"], {"task": {**DIGITS, **HUB}}),
    "huggingface_hub": (["data"], {"task": {**DIGITS, **HUB}}),
    "flwr_datasets": (
        ["data"],
        {
            "task": {
                "name": "digits-logreg",
                "local": LOCAL,
                "partition": {"scheme": "LinearPartitioner"},
            }
        },
    ),
    "distributed": (["sweep", "--on", "dask://127.0.0.1:8786"], {}),
    "submitit": (["sweep", "--on", "slurm"], {}),
    "dp_accounting": (["plan"], {"privacy": NOISE}),
    "mlflow": (["up", "--track", "mlflow"], {}),
    "tensorboard": (["up", "--track", "tensorboard"], {}),
    "wandb": (["up", "--track", "wandb"], {}),
    "transformers": (["plan"], {"task": {"name": "sent140-tinybert", "local": LOCAL}}),
    "peft": (["plan"], {"task": {"name": "sst2-bert-lora", "local": LOCAL}}),
}
"""Package -> command that needs it, and what it needs of the topology."""


def module(requirement: str) -> str:
    """Return the module of a requirement such as `dp-accounting>=0.4.4`."""
    name = re.split(r"[>=<]", requirement)[0].replace("-", "_")
    return "mlflow" if name == "mlflow_skinny" else name


def test_each_optional_package_is_in_its_extra_and_in_no_other() -> None:
    extras = {
        extra: {module(requirement) for requirement in requirements}
        for extra, requirements in PROJECT["optional-dependencies"].items()
        if extra not in ("dev", "docs")
    }
    assert {(name, extra) for extra, names in extras.items() for name in names} == {*EXTRAS.items()}
    assert not {*EXTRAS} & {*map(module, PROJECT["dependencies"])}


def test_nothing_optional_is_imported_before_it_is_needed() -> None:
    arguments = [",".join(EXTRAS), ",".join(THEIRS)]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# Of amqtt, see tests/testbed/test_requirements.py. Flower is looked for in a process of its own, out of
# reach of this one: tests/test_flower.py.
@pytest.mark.parametrize("package", sorted({*EXTRAS} - {"amqtt", "flwr"}))
def test_missing_package_is_reported_with_its_extra(
    package: str, testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TESTBED_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    (command, *options), changes = NEEDED[package]
    file = write_small_topology(tmp_path, **changes)
    if command == "sweep":
        (tmp_path / "sweep.yaml").write_text(f"base: {file.name}\ngrid: {{seed: [1]}}\n")
        file = tmp_path / "sweep.yaml"
    code, _, error = testbed(command, file, *options)
    assert code == 2, error
    said = " ".join(error.split())
    assert f"{package} is not installed: run" in said or f"needs {package}, which cannot be" in said
    assert f"{sys.executable} -m pip install 'edge-fl-testbed[{EXTRAS[package]}]'" in said


def test_doctor_lists_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    found = machine.optional()
    assert (found.status, found.fix) == ("ok", None)
    assert re.fullmatch(r"installed: bert, .*, wandb; not installed: datasets", found.detail)
