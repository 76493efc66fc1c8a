"""A new feature of devices: one module and a row, and tables, terminal, page, Prometheus, trackers,
export, summary, comparison and report show it. Its half in virtual time is one more row."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml

from agents import events
from agents.device_actions import DeviceAction, PowerOff, PowerOn, to_json
from agents.timing.nanoseconds import SECOND, Nanoseconds, to_seconds
from testbed.run import preparing, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.view import View
from testbed.virtual import faults, run
from testbed.virtual.device import VirtualHalf
from testbed.virtual.faults import World
from testbed.virtual.features import PARTS
from testbed.virtual.part import VirtualFleet
from testbed.virtual.timing import SCENARIO, EventQueue
from tests.test_recipes import copy as copy
from tests.test_recipes import insert, python

FOLDER = Path(__file__).parent / "new_feature"
RECORD = '''
"""Record of the feature."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Throttled:
    event: ClassVar[str] = "throttled"
    at: "float"
    client: "str"
    degrees: "float"
'''


def test_new_feature_appears_in_every_view(copy: Path) -> None:
    (copy / "agents/heat.py").write_text(RECORD)
    insert(copy / "agents/features.py", "\nAction = ", "from agents.heat import Throttled\n")
    insert(copy / "agents/features.py", "\nInitOrder = ", " | Throttled")
    shutil.copy(FOLDER / "heat.py", copy / "analysis/heat.py")
    rows = copy / "analysis/features.py"
    insert(rows, "from analysis import energy", "from analysis import heat\n")
    insert(rows, "energy.PART, ", "heat.PART, ")
    shutil.copy(FOLDER / "views.py", copy / "views.py")

    found = json.loads(python(copy, "views.py").splitlines()[-1])
    assert found["tables"] == {"heat": 4, "throttled": 1}
    assert found["columns"] == ["at", "client", "degrees"]
    assert {"heat", "throttled"} <= {*found["files"]}
    assert found["notice"] == "throttled"
    terminal = found["terminal"]
    assert "throttled 1 times" in terminal[1]
    heading = next(line.split() for line in terminal if " upd " in line)
    row = next(line.split() for line in terminal if "pi-1" in line)
    assert (heading[-1], row[-1]) == ("heat", "80")
    assert 'testbed_heat_celsius{device="pi-2"} 50.0' in found["prometheus"]
    assert found["tracked"]["throttled"] == 1.0
    assert [one["heat (°C)"] for one in found["page"]] == ["80", "65"]
    assert "hottest" in found["orders"]
    assert {"heat-over-time-0", "accuracy-by-heat"} <= {*found["panels"]}
    assert "throttled <b>1 times</b>" in found["header"]
    assert "hottest (°C)" in found["report"]
    assert found["summary"] == [80.0]
    assert "throttled 1 times" in found["end"]
    assert "80.0" in found["end"]
    assert found["cost"]
    assert "heat K·s" in found["compared"]
    assert found["charts"] == ["accuracy-by-heat", "loss-by-heat", "heat-over-time"]
    assert "pi-1 heat (°C)" in found["trace"]


class Heater(VirtualHalf):
    """Hot after 2.5 s of computation since it was cold."""

    def __init__(self) -> None:
        self.computed: Nanoseconds = 0

    def compute(self, now: Nanoseconds, duration: Nanoseconds, timed: Nanoseconds) -> None:
        self.computed += timed


class Heat(VirtualFleet):
    """A device that is hot powers off for 3 s."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue, self._heaters = queue, {"a": Heater()}

    def begin(self, world: World) -> tuple[()]:
        self._world = world
        return ()

    def half(self, name: str) -> VirtualHalf | None:
        return self._heaters.get(name)

    def check(self, name: str) -> None:
        if name in self._heaters and self._heaters[name].computed > 2.5 * SECOND:
            self._heaters[name].computed = 0
            self._act(name, PowerOff())
            cold = self._queue.now + 3 * SECOND
            self._queue.plan(cold, SCENARIO, 0, partial(self._act, name, PowerOn()))

    def _act(self, name: str, action: DeviceAction) -> None:
        now = self._queue.now
        self._world.write(events.Acted(to_seconds(now), name, "heat", 0.0, to_json(action)))
        faults.act(self._world, name, action, now)


def test_half_of_a_new_feature_in_virtual_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each training takes 1 s. The third would make `a` hot: it is off from 2 s to 5 s."""

    def part(_spec: object, queue: EventQueue, _network: object, _write: object) -> Heat:
        return Heat(queue)

    monkeypatch.setattr(run, "PARTS", (*PARTS, part))
    topology = {
        "name": "t",
        "task": {"name": "quadratic", "centers": [[0.0], [1.0]], "local": {"steps": 10, "lr": 0.1}},
        "rule": {"name": "fedbuff", "buffer_size": 1},
        "devices": [{"name": "a", "timing": "1s"}, {"name": "b", "timing": "1s"}],
        "stop": {"after": "8500ms"},
        "runtime": {"name": "virtual"},
    }
    (tmp_path / "topology.yaml").write_text(yaml.safe_dump(topology))
    parsed, plan = preparing.plan_file(tmp_path / "topology.yaml", Options())
    directory = RunDirectory.create(tmp_path, "run")
    up.run(parsed, plan, directory, Options(), View())
    records = list(events.read(directory.events))
    acted = [(r.at, r.device, r.source, r.action) for r in records if isinstance(r, events.Acted)]
    assert acted[:2] == [(2.0, "a", "heat", PowerOff()), (5.0, "a", "heat", PowerOn())]
    applied = [(r.client, r.applied) for r in records if isinstance(r, events.UpdateApplied)]
    assert [at for client, at in applied if client == "b"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [at for client, at in applied if client == "a"][:3] == [1.0, 2.0, 6.0]
