"""The benchmark of predictions: what it makes of runs in virtual time that stand for containers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import testbed
from analysis.load import Run
from benchmarks.prediction import Pair, by_runs, cells_of, table, uneven
from testbed import sweeps
from testbed.run.options import Options

COSTS = {"step_time": "1ms", "sliced_step_time": "1300us", "update_time": "3ms", "packets": True}
TOPOLOGY: dict[str, Any] = {
    "name": "t",
    "task": {"name": "digits-logreg", "local": {"steps": 100, "batch_size": 16, "lr": 0.02}},
    "rule": {"name": "fedbuff", "buffer_size": 2},
    "devices": [
        {"name": "fast", "count": 2, "cpu": 0.5, "link": {"up": "1mbit", "down": "5mbit"}},
        {"name": "slow", "count": 2, "cpu": 0.1},
    ],
    "runtime": {"name": "virtual"},
    "virtual": COSTS,
    "evaluate": {"every": "200ms"},
    "stop": {"after": "20s"},
}


@pytest.mark.parametrize("own", [True, False])
def test_virtual_runs_are_predicted_exactly(own: bool, tmp_path: Path) -> None:
    options = Options("virtual")
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(TOPOLOGY | {"stop": {"after": "5s"}}))
    variants = {"a": {}, "b": {"rule": {"name": "fedasync"}}}
    study = {"topology": "t.yaml", "variants": variants, "grid": {"seed": [1, 2]}}
    cells = cells_of(sweeps.from_mapping(study, "study", tmp_path, options))
    head, _, *rows = table(by_runs(cells, options, tmp_path, own=own))
    assert head == "| measured ÷ predicted | a | b |"
    assert len(rows) == 7
    for row in rows:
        assert row.count(" 1.00 (1.00 to 1.00) ") == 2, row


def test_run_that_takes_twice_as_long_is_reported(tmp_path: Path) -> None:
    def run(**changes: Any) -> Run:
        return testbed.simulate(TOPOLOGY, runs=tmp_path, **changes)

    twice = {"step_time": "2ms", "sliced_step_time": "2600us", "update_time": "6ms"}
    measured = run(virtual=twice | {"packets": True})
    cells = [row.split("|") for row in table([Pair("a", measured, (run(),))])]
    rows = {title.strip(): ratio.strip() for _, title, ratio, _ in cells}
    assert rows["training time"] == "2.00"
    assert float(rows["updates per device"]) == pytest.approx(0.5, abs=0.03)
    assert float(rows["time to 80%"]) > 1.5


def test_predicted_devices_have_the_measured_shares(tmp_path: Path) -> None:
    """Two that were to have 0.1 of a core had 0.08."""
    predicted = testbed.simulate(TOPOLOGY, runs=tmp_path)
    fast, slow = TOPOLOGY["devices"]
    measured = testbed.simulate(TOPOLOGY, runs=tmp_path, devices=[fast, {**slow, "cpu": 0.08}])
    measured = replace(measured, manifest=predicted.manifest)
    found = uneven(Pair("a", measured, (predicted,)), Options("virtual"), tmp_path / "uneven")
    assert found.measured is measured
    (again,) = found.predicted
    shares = {one["set"][0]: one["cpu"] for one in again.topology["scenario"]}
    assert shares == pytest.approx(
        {"fast-1": 0.5, "fast-2": 0.5, "slow-1": 0.08, "slow-2": 0.08}, rel=0.03
    )
