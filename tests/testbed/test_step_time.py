"""Cost of a training step, estimated from runs, for the prediction of others in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import testbed
from analysis.load import Run
from testbed.errors import BadInputError
from testbed.topology import Virtual, units
from tests.running import Testbed

COSTS = {
    "step_time": "2ms",
    "sliced_step_time": "2600us",
    "start_time": "3s",
    "update_time": "3ms",
    "packets": True,
}
DEVICES = [
    {"name": "fast", "count": 2, "cpu": 0.5, "link": {"up": "5mbit", "down": "20mbit", "rtt": "40ms"}},
    {"name": "slow", "count": 2, "cpu": 0.1},
]


def simulated(path: Path, **changes: Any) -> Run:
    topology = {
        "name": "t",
        "task": {"name": "digits-logreg", "local": {"steps": 50, "batch_size": 8, "lr": 0.1}},
        "rule": {"name": "fedbuff", "buffer_size": 2},
        "devices": DEVICES,
        "virtual": COSTS,
        "stop": {"after": "30s"},
    }
    return testbed.simulate(topology, runs=path, **changes)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run to which nothing happens."""
    return simulated(tmp_path_factory.mktemp("usual"))


def as_given(virtual: dict[str, Any]) -> dict[str, Any]:
    """Return the costs in seconds, as a topology with these keys means them."""
    read = Virtual(**virtual)
    return {name: getattr(read, name) for name in COSTS}


def test_step_time_is_estimated_from_a_run_with_or_without_disturbances(
    usual: Run, tmp_path: Path
) -> None:
    disturbed = simulated(
        tmp_path,
        rule={"name": "defedavg_niid", "sample": 3},  # models wait until a training has ended
        scenario=[
            {"at": "5s", "set": "fast-1", "cpu": 0.2},
            {"at": "7s", "pause": "slow-1", "for": "4s"},
            {"at": "9s", "crash": "slow-2", "restart_after": "2s"},
        ],
        churn={"rate": "6/min", "downtime": "2s"},
    )
    for run in (usual, disturbed):
        found = testbed.step_time([run])
        assert as_given(found.virtual) == pytest.approx(as_given(COSTS), rel=1e-4)
        assert len(found.virtual["step_time"]) <= len("0.00012345s")  # no digits of chance
        assert set(found.devices["device"]) == {"fast-1", "fast-2", "slow-1", "slow-2"}


def test_start_time_is_estimated_from_a_run(tmp_path: Path) -> None:
    """Not those of a client that is paused or cut off, or of which something else is asked meanwhile."""
    costs = COSTS | {"start_time": "1700ms"}
    scenario = [
        {"at": "2s", "crash": "slow-2", "restart_after": "1s"},
        {"at": "2s", "disconnect": "fast-1", "for": "9s"},
        {"at": "3s", "crash": "fast-1", "restart_after": "1s"},
        {"at": "9s", "pause": "slow-1", "for": "6s"},
        {"at": "10s", "crash": "slow-1", "restart_after": "1s"},
        {"at": "12s", "crash": "fast-2", "restart_after": "1s"},
        {"at": "14s", "crash": "fast-2", "restart_after": "1s"},
        {"at": "16s", "leave": "slow-2"},
        {"at": "18s", "join": "slow-2"},
    ]
    found = testbed.step_time([simulated(tmp_path, scenario=scenario, virtual=costs)])
    assert as_given(found.virtual) == pytest.approx(as_given(costs), rel=1e-4)


def test_estimates_work_with_changing_links(tmp_path: Path) -> None:
    """Each half second, as by a trace; a training takes 0.2 or 1.2 s, and a start 3 s."""
    halves = [at / 2 for at in range(1, 58)]
    scenario: list[dict[str, Any]] = [
        {"at": f"{at}s", "set": name, "link": {"up": f"{4 + at % 1}mbit"}}
        for at in halves
        for name in ("fast", "slow")
    ]
    scenario.append({"at": "9100ms", "crash": "slow-2", "restart_after": "2s"})
    scenario.sort(key=lambda step: units.duration(step["at"]))
    run = simulated(
        tmp_path, devices=[DEVICES[0], DEVICES[1] | {"link": {"up": "4mbit"}}], scenario=scenario
    )
    found = testbed.step_time([run])
    assert as_given(found.virtual) == pytest.approx(as_given(COSTS), rel=1e-4)
    assert set(found.devices["device"]) == {"fast-1", "fast-2", "slow-1", "slow-2"}


def test_several_runs_are_estimated_together(tmp_path: Path) -> None:
    """Each is of one share, so that alone none of them tells what slices cost."""
    alone = [simulated(tmp_path, devices=[device]) for device in DEVICES]
    first, _ = (as_given(testbed.step_time([run]).virtual) for run in alone)
    assert first["step_time"] == first["sliced_step_time"] == pytest.approx(2.2e-3, rel=1e-4)
    assert as_given(testbed.step_time(alone).virtual) == pytest.approx(as_given(COSTS), rel=1e-4)


def test_estimate_is_printed_as_topology_keys(usual: Run, testbed: Testbed) -> None:
    said = testbed("calibrate", usual.path)
    assert said.code == 0
    table, _, settings = said.out.partition("\n\nFor virtual time")
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [["0.5", "2"], ["0.1", "2"]]
    copied = yaml.safe_load(settings.partition("\n\n")[2])
    assert as_given(copied["virtual"]) == pytest.approx(as_given(COSTS), rel=1e-4)
    assert json.loads(testbed("calibrate", usual.path, "--json").out)["virtual"] == copied["virtual"]


def test_run_without_evidence_gives_no_estimate(tmp_path: Path) -> None:
    by_timing = simulated(tmp_path, devices=[{"name": "fast", "cpu": 0.5, "timing": "1s"}])
    with pytest.raises(BadInputError, match=f"{by_timing.name}: no updates of devices whose speed is"):
        testbed.step_time([by_timing])


def test_runs_of_different_work_are_refused_together(usual: Run, tmp_path: Path) -> None:
    local = {"steps": 50, "batch_size": 16, "lr": 0.1}
    other = simulated(tmp_path, task={"name": "digits-logreg", "local": local})
    with pytest.raises(BadInputError, match="differ in task or batch size"):
        testbed.step_time([usual, other])
