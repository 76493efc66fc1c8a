"""Crash, outage and churn on bad links in one run, under rules of each kind."""

from __future__ import annotations

from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml

from agents import events
from agents.device_actions import to_json
from agents.timing.nanoseconds import SECOND, to_seconds
from testbed.plan.agent_configs import RunSpec
from testbed.plan.planned_devices import action_steps
from testbed.run import preparing
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.view import View
from testbed.virtual.run import FileRecorder, _simulation

AFTER = 200
CENTERS = [[float(k), float(k**2)] for k in range(6)]
TOPOLOGY = {
    "name": "faults",
    "task": {"name": "quadratic", "centers": CENTERS, "local": {"steps": 5, "lr": 0.1}},
    "devices": [
        {
            "name": "flaky",
            "count": 4,
            "timing": {"distribution": "exponential", "mean": "1s"},
            "link": {"up": "8kbit", "down": "16kbit", "rtt": "100ms", "jitter": "20ms", "loss": "2%"},
        },
        {"name": "steady", "count": 2, "timing": "1500ms"},
    ],
    "scenario": [
        {"at": "20s", "crash": "flaky-1", "restart_after": "15s"},
        {"at": "40s", "disconnect": ["steady-1", "flaky-2"], "for": "30s"},
    ],
    "churn": {
        "rate": "1/min",
        "downtime": {"distribution": "exponential", "mean": "5s"},
        "devices": "flaky",
    },
    "stop": {"after": f"{AFTER}s"},
    "runtime": {"name": "virtual"},
}


def _played(folder: Path, rule: dict[str, Any]) -> tuple[RunSpec, list[events.Record]]:
    path = folder / "topology.yaml"
    path.write_text(yaml.safe_dump(TOPOLOGY | {"rule": rule}))
    topology, plan = preparing.plan_file(path, Options())
    directory = RunDirectory.create(folder, "run")
    spec, prepared = preparing.prepare(topology, plan, directory, Options(), View())
    with closing(FileRecorder(directory, View())) as recorder:
        _simulation(spec, prepared, View(), recorder).run(0.0, lambda: False)
    return spec, list(events.read(directory.events))


@pytest.mark.parametrize(
    "rule",
    [
        {"name": "fedbuff", "buffer_size": 2},
        {"name": "defedavg_niid", "sample": 2},
        {"name": "area", "criterion": "every", "every": 2},
    ],
    ids=lambda rule: rule["name"],
)
def test_run_continues_after_faults_and_records_them(tmp_path: Path, rule: dict[str, Any]) -> None:
    spec, records = _played(tmp_path, rule)
    assert isinstance(records[-1], events.RunEnded)
    assert (records[-1].reason, records[-1].at) == ("after", AFTER)
    due = [
        (round(to_seconds(step.at), 6), step.device, to_json(step.action))
        for step in takewhile(
            lambda step: step.at <= AFTER * SECOND, action_steps(spec.topology, spec.plan)
        )
    ]
    assert [(r.at, r.device, r.details) for r in records if isinstance(r, events.Acted)] == due
    assert len(due) > 10
    applied = [r for r in records if isinstance(r, events.UpdateApplied)]
    assert {r.client for r in applied if r.applied > AFTER - 30} == set(spec.topology.device_names)
    assert not any(40.1 < r.arrived < 70 for r in applied if r.client == "steady-1")
