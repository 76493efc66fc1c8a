"""The table states what each runtime supports; other code knows no runtime by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.errors import BadInputError
from testbed.plan import HostResources, plan
from testbed.runtimes import Emulator, Simulator, emulator, simulator
from testbed.runtimes.docker import runtime as docker
from testbed.runtimes.process import runtime as process
from testbed.runtimes.swarm import runtime as swarm
from testbed.topology import parse
from testbed.traits import RUNTIMES, emulated_runtime_names, is_simulated, runtime_names, traits
from testbed.virtual import run as virtual

ROOT = Path(__file__).parents[2]
PRODUCT = ("agents", "analysis", "benchmarks", "testbed")

EMULATORS: dict[str, Emulator] = {
    "docker": docker,
    "process": process,
    "swarm": swarm,
}  # mypy holds them to it
SIMULATORS: dict[str, Simulator] = {"virtual": virtual}


def test_each_runtime_trait_row_has_its_module() -> None:
    assert {name: emulator(name) for name in emulated_runtime_names()} == EMULATORS
    found = {name: simulator(name) for name in RUNTIMES if is_simulated(name)}
    assert found == SIMULATORS


def test_unknown_runtime_has_no_traits() -> None:
    topology = parse(
        "name: t\ntask: {name: digits-logreg, local: {steps: 1}}\nrule: {name: fedavg}\n"
        "devices: [{name: d, cpu: 0.1}]\nstop: {after: 10s}\n"
    )
    names = "docker, swarm, process or virtual"
    for asks in (traits, emulator, lambda name: plan(topology, name, HostResources((0, 1), 2**34))):
        with pytest.raises(BadInputError, match=f"called 'dokcer', expected {names}"):
            asks("dokcer")
    assert not is_simulated("dokcer")
    assert not is_simulated(None)


def test_runtimes_are_listed_in_words() -> None:
    assert runtime_names() == "docker, swarm, process or virtual"
    assert runtime_names(lambda t: not t.cgroups) == "process or virtual"
    assert runtime_names(lambda t: t.simulated) == "virtual"


def test_code_asks_for_traits_and_not_for_names() -> None:
    files = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in _asks(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        'runtime == "docker"',
        '"virtual" != plan.runtime',
        'runtime in ("process", "docker")',
        '{"docker": 1}[runtime]',
        'match runtime:\n    case "auto" | "process": pass',
        'runtime.startswith("docker")',
    ],
)
def test_comparison_with_a_runtime_name_is_detected(code: str) -> None:
    assert list(_asks(code)) != []


def _asks(code: str) -> Iterator[int]:
    """Lines that compare with the name of a runtime, or look something up by it; but not the table."""
    for node in ast.walk(ast.parse(code)):
        asked: list[ast.AST | None] = []
        match node:
            case ast.Compare(left, _, others):
                asked = [left, *others]
            case ast.MatchValue(value):
                asked = [value]
            case ast.Dict(keys, values):
                table = all(isinstance(v, ast.Call) and ast.unparse(v.func) == "Traits" for v in values)
                asked = [] if table else [*keys]
            case ast.Call(ast.Attribute(attr="startswith" | "endswith"), arguments):
                asked = [*arguments]
        constants = (part for each in asked if each is not None for part in ast.walk(each))
        if any(isinstance(part, ast.Constant) and part.value in RUNTIMES for part in constants):
            yield node.lineno if isinstance(node, ast.expr | ast.pattern) else 0
