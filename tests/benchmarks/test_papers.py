"""The papers' topologies and `python -m benchmarks.papers`. What the runs come to is not tested here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.papers.__main__ import SETS
from benchmarks.papers.bench import TOPOLOGIES, Bench, Setting
from testbed import topology
from testbed.errors import BadInputError, RunFailedError

NAMES = sorted(path.stem for path in TOPOLOGIES.glob("*.yaml"))
SHORT = {"task.local.steps": 1, "stop": {"updates": 3}, "evaluate": {"every": "60s", "samples": 100}}


def papers(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.papers", *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, check=False)


def test_every_set_has_its_topologies() -> None:
    found = {name.partition("-")[0] for name in NAMES}
    assert found == set(SETS)


def test_the_topologies_are_valid() -> None:
    assert {topology.load(TOPOLOGIES / f"{name}.yaml").runtime.name for name in NAMES} == {"virtual"}


def study(name: str, **changes: object) -> dict[str, object]:
    return {"topology": name, "variants": {"short": {**SHORT, **changes}}, "grid": {"seed": [2]}}


@pytest.mark.parametrize("name", ["area", "defedavg-niid"])
def test_a_topology_runs_once(name: str, data_root: Path, tmp_path: Path) -> None:
    told: list[str] = []
    bench = Bench(tmp_path, data_root, told.append)
    ((setting, run),) = bench.run("short", study(f"{name}.yaml")).items()
    assert setting == Setting("short", lr=run.topology["task"]["local"]["lr"], seed=2)
    assert run.evaluations["at"][0] == 0
    assert len(run.versions) >= 1
    again = bench.run("short", study(f"{name}.yaml"))
    assert again[setting].path == run.path
    assert told[-1].startswith("1 of 1 runs are there already")
    assert bench.runs == 2


def test_a_change_that_fits_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"task\.local\.rate: unknown key"):
        Bench(tmp_path, None, print).run("wrong", study("area.yaml", **{"task.local.rate": 0.5}))


def test_a_run_that_fails_is_told(tmp_path: Path, data_root: Path) -> None:
    told: list[str] = []
    greedy = {"scheme": "dirichlet", "alpha": 0.1, "min_samples": 60_000}
    with pytest.raises(RunFailedError, match="1 of 1 runs of wrong failed"):
        Bench(tmp_path, data_root, told.append).run(
            "wrong", study("area.yaml", **{"task.partition": greedy})
        )
    assert "failed: " in told[-1]
    assert "task.partition: 128 devices for 60000 training samples" in told[-1]


def test_a_quick_set_prints_figures_and_verdicts(data_root: Path) -> None:
    ended = papers("fedfix", "--quick", "--data", data_root)
    assert ended.returncode == 0, ended.stderr
    assert "Figures 2 and 4" in ended.stdout
    assert ended.stdout.count("hold") >= 4
    assert "10 runs" in ended.stdout
    assert "for the verdicts to be trusted" in ended.stdout
    assert all(len(line.rstrip()) <= 100 for line in ended.stdout.splitlines())


def test_missing_data_is_told(tmp_path: Path) -> None:
    ended = papers("area", "--data", tmp_path, HF_HUB_OFFLINE="1")
    assert ended.returncode == 2
    assert "ylecun/mnist" in ended.stderr
    assert "TESTBED_DATA" in ended.stderr


def test_an_unknown_set_is_told() -> None:
    ended = papers("fedprox")
    assert ended.returncode == 2
    assert "expected one of area, fedfix, defedavg, fedfa" in ended.stderr
