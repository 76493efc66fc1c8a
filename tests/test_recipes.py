"""ARCHITECTURE.md, "Where to add": a rule, a task, a chart and a device action are added to a copy of
the packages through the steps that it names, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[1]
TOPOLOGY = """
name: recipe
task: {name: line, local: {steps: 5, lr: 0.2}}
rule: {name: eager, server_lr: 0.5}
devices: [{name: d, count: 2, timing: 100ms}]
stop: {after: 5s}
runtime: {name: virtual}
"""

TASK = '''
"""A straight line through points: y = 2x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from agents.shards import Shard
from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Line(Task):
    """One weight, which is 2 in the end."""

    dataset: ClassVar[None] = None
    has_accuracy: ClassVar[bool] = False

    @property
    def l2(self) -> float:
        return 0.0

    def model(self) -> torch.nn.Module:
        import torch

        return torch.nn.Linear(1, 1, bias=False)

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs.squeeze(1) - 2 * y).square()

    def correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        return None

    def shards(self) -> Sequence[Shard]:
        y = np.array([0, 1, 2])
        return [Shard(y.astype(np.float32).reshape(-1, 1), y, 1.0)] * 2
'''

CHART = '''
"""How many updates each run had."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.charts.chart import Axis, Chart, Layer
from analysis.load import Run


def counts(runs: Sequence[Run]) -> Chart:
    """Updates over runs."""
    columns = {"x": list(range(len(runs))), "y": [len(run.updates) for run in runs]}
    return Chart("Updates", Axis("run"), Axis("updates"), (Layer("updates", "points", columns),))
'''


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The packages, to be added to."""
    for package in ("agents", "analysis", "testbed"):
        shutil.copytree(ROOT / package, tmp_path / package)  # with its byte code
    (tmp_path / "topology.yaml").write_text(TOPOLOGY)
    return tmp_path


def insert(path: Path, before: str, line: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{path}: {before}"
    path.write_text(text.replace(before, line + before), encoding="utf-8")


def python(copy: Path, *arguments: str) -> str:
    command, env = [sys.executable, *arguments], {"PYTHONPATH": str(copy), "PATH": os.environ["PATH"]}
    ended = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_recipe_adds_a_rule_a_task_and_a_chart(copy: Path) -> None:
    """The rule is the example that `agents/rules/interface.py` says to copy."""
    interface = (copy / "agents/rules/interface.py").read_text(encoding="utf-8")
    example = interface[interface.index("    @dataclass") : interface.index('"""\n\nfrom __future__')]
    (copy / "agents/rules/eager.py").write_text(
        "from dataclasses import dataclass\nfrom typing import ClassVar\n\n"
        "from agents.rules.interface import Actions, Rule, Send, Server, State, Update\n"
        "from agents.models.vectors import add_scaled\n\n\n" + textwrap.dedent(example)
    )
    rules = copy / "agents/rules/__init__.py"
    insert(rules, "from agents.rules.favano", "from agents.rules.eager import Eager\n")
    insert(rules, '    "favano": Favano', '    "eager": Eager,\n')
    (copy / "agents/tasks/line.py").write_text(TASK.lstrip())
    tasks = copy / "agents/tasks/__init__.py"
    insert(tasks, "from agents.tasks.logreg", "from agents.tasks.line import Line\n")
    insert(tasks, '    "mnist-cnn"', '    "line": Line,\n')
    (copy / "analysis/charts/counts.py").write_text(CHART.lstrip())
    charts = copy / "analysis/charts/__init__.py"
    insert(charts, "from analysis.charts.chart import", "from analysis.charts import counts\n")
    insert(charts, '    "cpu": fidelity.cpu', '    "counts": counts.counts,\n')

    assert "eager" in python(copy, "-m", "testbed", "rules")
    printed = python(copy, "-m", "testbed", "up", "topology.yaml")
    assert "time is up" in printed
    drawn = python(
        copy,
        "-c",
        "from analysis.charts import CHARTS, paper\n"
        "from analysis.load import load_many\n"
        "runs = load_many('runs')\n"
        "paper.draw(CHARTS['counts'](runs)).savefig('counts.png')\n"
        "print(len(runs[0].updates), runs[0].evaluations['loss'].iloc[-1] < 1e-6)\n",
    )
    assert drawn.split() == ["100", "True"]
    assert (copy / "counts.png").stat().st_size > 1000


def test_recipe_adds_a_device_action_and_mypy_names_unhandled_places(copy: Path) -> None:
    """A class, a member of the union, a row of the table: it has a JSON form and folds like others."""
    actions = copy / "agents/device_actions.py"
    insert(
        actions,
        "Switching = Crash",
        'class Overheat(ActionFields, frozen=True):\n    """Let it cool."""\n\n\n',
    )
    insert(actions, " | Restart | Pause | Resume", " | Overheat")
    insert(actions, '    Pause: {"frozen": True},', '    Overheat: {"frozen": True},\n')
    program = (
        "from agents.device_actions import DeviceState, Overheat, from_json, to_json\n"
        "state = DeviceState().with_action(Overheat())\n"
        "print(to_json(Overheat()), from_json(to_json(Overheat())), state)"
    )
    printed = python(copy, "-c", program)
    assert printed.startswith("{'action': 'overheat'} Overheat() DeviceState(")
    shutil.copy(ROOT / "pyproject.toml", copy)
    # Without what else is installed, and without modules that neither define nor handle actions, mypy
    # takes a fiftieth of the time. What is missing is not looked for.
    (copy / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    options = ["--no-site-packages", "--follow-imports", "skip", "--cache-dir", os.devnull]
    modules = [*copy.glob("agents/**/*.py"), *copy.glob("testbed/**/*.py")]
    handlers = [str(file.relative_to(copy)) for file in modules if "assert_never" in file.read_text()]
    defined = ["agents/device_actions.py", "agents/features.py", "agents/fields.py"]
    defined += [str(file.relative_to(copy)) for file in copy.glob("agents/*/messages.py")]
    command = [sys.executable, "-m", "mypy", *options, *defined, *handlers]
    checked = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    forgets = r'^(\S+?\.py):\d+: error: Argument 1 to "assert_never" has incompatible type "Overheat"'
    named = set(re.findall(forgets, checked.stdout, re.MULTILINE))
    assert named == {
        "agents/device/main.py",
        "testbed/runtimes/docker/container_actions.py",
        "testbed/runtimes/process/runtime.py",
        "testbed/topology/scenario.py",
        "testbed/virtual/faults.py",
    }
