"""The papers' topologies and `python -m benchmarks.papers`. What the runs come to is not tested here."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.papers.__main__ import SETS
from benchmarks.papers.trials import TOPOLOGIES, Curve, Judge, Trial, changed, execute, judged
from testbed import data
from testbed.errors import BadInputError

NAMES = sorted(path.stem for path in TOPOLOGIES.glob("*.yaml"))
CURVE = Curve((0, 10, 20, 30, 40, 50), (4, 3, 1, 2, 1, 0), (0.1, 0.3, 0.5, 0.4, 0.6, 0.8), 5)


def papers(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.papers", *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, check=False)


def test_every_set_has_its_topologies() -> None:
    found = {name.partition("-")[0] for name in NAMES}
    assert found == set(SETS)


def test_the_topologies_are_valid() -> None:
    assert {changed(name, {}).runtime.name for name in NAMES} == {"virtual"}


@pytest.mark.parametrize("name", ["area", "defedavg-niid"])
def test_a_topology_runs(name: str, data_root: Path) -> None:
    changes = {"task.local.steps": 1, "stop.updates": 3, "evaluate.every": "60s"}
    curve = execute(Trial(name, changes, Judge("test", 100)), data_root)
    assert curve.at[0] == 0
    assert curve.versions >= 1


def test_what_is_changed_and_what_is_not() -> None:
    topology = changed("area", {"task.local.lr": 0.5, "devices.0.speed": 10, "rule": {"name": "fedavg"}})
    (group,) = topology.devices
    assert group.local.plain().lr == 0.5
    assert group.local.plain().batch_size == 32
    assert group.speed.draw(seed=1, device="client-1") == 10
    assert topology.rule.name == "fedavg"


def test_a_change_that_fits_nothing_is_told() -> None:
    with pytest.raises(BadInputError, match=r"area\.yaml, changed.*unknown key"):
        changed("area", {"task.local.rate": 0.5})


def test_the_clients_judge_alike_however_much_they_have(data_root: Path) -> None:
    prepared = data.prepare(changed("fedfix-mnist", {}), data_root)
    test = judged(prepared, Judge("clients", 7)).test
    assert len(test) == 7 * 10
    own = prepared.train.y[prepared.indices["client-10"]]
    assert set(test.y[-7:]) <= set(own)


def test_times_are_interpolated() -> None:
    assert CURVE.time_to_accuracy(0.45) == pytest.approx(17.5)
    assert CURVE.time_to_accuracy(0.5) == 20
    assert CURVE.time_to_accuracy(0.05) == 0
    assert CURVE.time_to_accuracy(0.9) == math.inf
    assert CURVE.time_to_loss(1.5) == pytest.approx(17.5)


def test_the_end_is_the_last_fifth() -> None:
    assert CURVE.final_accuracy == pytest.approx(0.7)
    assert CURVE.final_loss == pytest.approx(0.5)


def test_a_quick_set_prints_figures_and_verdicts(data_root: Path) -> None:
    ended = papers("fedfix", "--quick", "--data", data_root)
    assert ended.returncode == 0, ended.stderr
    assert "Figures 2 and 4" in ended.stdout
    assert ended.stdout.count("hold") >= 3
    assert "7 runs" in ended.stdout
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
