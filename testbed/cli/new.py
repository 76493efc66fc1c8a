"""`testbed new`: a commented starting point for a task, a rule or a topology, which runs as it is."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from testbed.cli.app import App
from testbed.cli.arguments import AsJson
from testbed.console import remark, written

Name = Annotated[str, typer.Argument(help="Lower-case letters, digits and -, such as my-rule.")]


def add_to(app: typer.Typer) -> None:
    """Make the commands known."""
    commands = App(help="Write a starting point for a task, a rule or a topology.")
    for command in (task, rule, topology):
        commands.command()(command)
    app.add_typer(commands, name="new", rich_help_panel="Reference")


def task(name: Name, as_json: AsJson = False) -> None:
    """Write NAME.yaml, and a Python file with the task that it learns."""
    _write("task", name, as_json=as_json)


def rule(name: Name, as_json: AsJson = False) -> None:
    """Write NAME.yaml, and a Python file with the rule that it uses."""
    _write("rule", name, as_json=as_json)


def topology(name: Name, as_json: AsJson = False) -> None:
    """Write NAME.yaml, a topology."""
    _write("topology", name, as_json=as_json)


def _write(kind: Literal["task", "rule", "topology"], name: str, *, as_json: bool) -> None:
    from testbed.api import templates

    written(templates.new(kind, name), as_json=as_json)
    if not as_json:
        remark(f"Next: testbed up {name}.yaml --runtime virtual")
