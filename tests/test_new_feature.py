"""A new feature of devices: one module and a row, and tables, terminal, page, Prometheus, trackers,
export, summary, comparison and report show it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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
