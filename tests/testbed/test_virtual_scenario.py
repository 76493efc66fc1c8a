"""What a scenario does to devices in virtual time: when their updates are applied, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from agents import events
from testbed import up
from testbed.rundir import RunDirectory
from tests.testbed.test_virtual_run import Silence

A = {"name": "a", "timing": "1s"}
WORKER = {"name": "a", "cpu": 0.5}
"""A second for 10 steps."""


def _run(folder: Path, scenario: list[dict[str, Any]], **changes: Any) -> list[events.Record]:
    """A run of `a`, which takes a second for an update, beside `b`, which takes 100."""
    topology = {
        "name": "t",
        "task": {"name": "quadratic", "centers": [[0.0], [1.0]], "local": {"steps": 10, "lr": 0.1}},
        "rule": {"name": "fedbuff", "buffer_size": 1},
        "devices": [A, {"name": "b", "timing": "100s"}],
        "scenario": scenario,
        "evaluate": {"every": "5s"},
        "stop": {"after": "7200ms"},
        "runtime": {"name": "virtual", "step_time": "50ms"},
    }
    path = folder / "topology.yaml"
    path.write_text(yaml.safe_dump(topology | changes))
    parsed, plan = up.planned(path, up.Options())
    directory = RunDirectory.create(folder, "run")
    up.run(parsed, plan, directory, up.Options(), Silence())
    return list(events.read(directory.events))


def _applied(records: list[events.Record], client: str = "a") -> list[float]:
    return [r.applied for r in records if isinstance(r, events.UpdateApplied) and r.client == client]


@pytest.mark.parametrize(
    ("device", "scenario", "applied"),
    [
        (A, [], [1, 2, 3, 4, 5, 6, 7]),
        # The third was half done.
        (A, [{"at": "2500ms", "pause": "a", "for": "2s"}], [1, 2, 5, 6, 7]),
        (A, [{"at": "2500ms", "crash": "a", "restart_after": "2s"}], [1, 2, 5.5, 6.5]),
        (A, [{"at": "2500ms", "crash": "a"}], [1, 2]),
        # Trained at 3, on its way at once, and the model comes back at once.
        (A, [{"at": "2500ms", "disconnect": "a", "for": "2s"}], [1, 2, 4.5, 5.5, 6.5]),
        (A, [{"at": "3500ms", "leave": "a"}, {"at": "5s", "join": "a"}], [1, 2, 3, 6, 7]),
        (A, [{"at": "3s", "join": "a"}], [4, 5, 6, 7]),
        # What is set before it joins holds from there on.
        (
            WORKER,
            [{"at": "1s", "set": "a", "cpu": 0.25}, {"at": "3s", "join": "a"}],
            [5, 7],
        ),
        # Half a second each way from there on.
        (A, [{"at": "1500ms", "set": "a", "link": {"rtt": "1s"}}], [1, 2.5, 4.5, 6.5]),
        (WORKER, [], [1, 2, 3, 4, 5, 6, 7]),
        # Half of the second takes a second now, all others two.
        (WORKER, [{"at": "1500ms", "set": "a", "cpu": 0.25}], [1, 2.5, 4.5, 6.5]),
        # The same, but for a pause that is on when the share changes.
        (
            WORKER,
            [
                {"at": "1250ms", "pause": "a", "for": "500ms"},
                {"at": "1500ms", "set": "a", "cpu": 0.25},
            ],
            [1, 3.25, 5.25],
        ),
    ],
)
def test_when_updates_are_applied(
    tmp_path: Path, device: dict[str, Any], scenario: list[dict[str, Any]], applied: list[float]
) -> None:
    slow = {"name": "b", "timing": "100s"}
    assert _applied(_run(tmp_path, scenario, devices=[device, slow])) == pytest.approx(applied)


def test_the_log_tells_what_was_done_and_what_became_of_it(tmp_path: Path) -> None:
    records = _run(tmp_path, [{"at": "2s", "crash": "a", "restart_after": "1s"}])
    told = [
        (r.at, r.details["action"] if isinstance(r, events.Acted) else r.state)
        for r in records
        if isinstance(r, events.Acted | events.ClientStatus)
    ]
    assert told == [(2, "crash"), (2, "offline"), (3, "restart"), (3, "joining"), (3, "ready")]


def test_churn_and_availability_are_the_same_each_time(tmp_path: Path) -> None:
    lines = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        off = {"on": {"distribution": "exponential", "mean": "20s"}, "off": "5s"}
        _run(
            folder,
            [],
            devices=[{**A, "count": 5, "availability": off}, {"name": "b", "timing": "3s"}],
            task={"name": "quadratic", "centers": [[0.0]] * 6, "local": {"steps": 1, "lr": 0.1}},
            churn={"rate": "2/min", "downtime": {"distribution": "exponential", "mean": "5s"}},
            stop={"after": "200s"},
        )
        lines.append((folder / "run" / "events.jsonl").read_text().splitlines()[1:])
    assert lines[0] == lines[1]
    actions = {line.split('"action":"')[-1].split('"')[0] for line in lines[0] if '"details"' in line}
    assert actions == {"crash", "restart", "disconnect", "reconnect"}


def test_who_leaves_takes_its_memory_out_of_areas_mean(tmp_path: Path) -> None:
    _run(
        tmp_path,
        [{"at": "50s", "leave": "c"}],
        devices=[{"name": name, "timing": "1s"} for name in "abc"],
        task={"name": "quadratic", "centers": [[0.0], [3.0], [9.0]], "local": {"steps": 1, "lr": 0.1}},
        rule={"name": "area", "criterion": "every", "every": 2},
        stop={"after": "350s"},
    )
    (w,) = load_file(tmp_path / "run" / "models" / "final.safetensors").values()
    assert float(w[0]) == pytest.approx(1.5, abs=1e-3)
