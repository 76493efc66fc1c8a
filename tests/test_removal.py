"""Features without their rooms and rows: what is left is whole for mypy, and runs."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_recipes import ROOT, python
from tests.test_recipes import copy as copy

pytestmark = pytest.mark.hosts  # for mypy's time

ROOMS = (
    "analysis.energy",
    "analysis.segments",
    "analysis.selection",
    "testbed.energy",
    "testbed.secure",
    "testbed.selection",
)


class WithoutRows(ast.NodeTransformer):
    """Removes imports of a room, and elements of tuples and base classes that name what they import."""

    def __init__(self, room: str) -> None:
        self._room = room
        self.names: set[str] = set()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        origin = node.module or ""
        gone = [one for one in node.names if f"{origin}.{one.name}.".startswith(f"{self._room}.")]
        self.names |= {one.asname or one.name for one in gone}
        node.names = [one for one in node.names if one not in gone]
        return node if node.names else None

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        node.elts = [one for one in node.elts if not self._names(one)]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.bases = [one for one in node.bases if not self._names(one)]
        return node

    def _names(self, node: ast.AST) -> bool:
        return any(isinstance(one, ast.Name) and one.id in self.names for one in ast.walk(node))


def test_rest_is_whole_without_rooms_and_their_rows(copy: Path) -> None:
    """No room needs another (an import contract), so all at once show what each alone would."""
    for room in ROOMS:
        place = copy / room.replace(".", "/")
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.with_suffix(".py").unlink()
        for table in copy.glob("*/**/features.py"):
            without = WithoutRows(room)
            tree = without.visit(ast.parse(table.read_text()))
            if without.names:
                table.write_text(ast.unparse(tree))
    shutil.copy(ROOT / "pyproject.toml", copy)
    command = [sys.executable, "-m", "mypy", "agents", "analysis", "testbed"]
    checked = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout

    (copy / "topology.yaml").write_text((ROOT / "topologies/quickstart.yaml").read_text())
    python(copy, "-m", "testbed", "up", "topology.yaml", "--runtime", "virtual")
    (run,) = (copy / "runs").iterdir()
    python(copy, "-m", "testbed", "report", str(run))
