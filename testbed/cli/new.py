"""`testbed new`: a commented starting point for a task, a rule or a topology, which runs as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.app import App
from testbed.cli.arguments import AsJson
from testbed.console import remark, written
from testbed.errors import BadInputError

_TEMPLATES = Path(__file__).parents[1] / "catalog" / "new"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")

Name = Annotated[str, typer.Argument(help="Lower-case letters, digits and -, such as my-rule.")]


def add_to(app: typer.Typer) -> None:
    """Make the commands known."""
    commands = App(help="Write a starting point for a task, a rule or a topology.")
    for command in (task, rule, topology):
        commands.command()(command)
    app.add_typer(commands, name="new", rich_help_panel="Reference")


def task(name: Name, as_json: AsJson = False) -> None:
    """Write NAME.yaml, and a Python file with the task that it learns."""
    _write_class(name, "task", as_json=as_json, rule="fedbuff, buffer_size: 2")


def rule(name: Name, as_json: AsJson = False) -> None:
    """Write NAME.yaml, and a Python file with the rule that it uses."""
    _write_class(name, "rule", as_json=as_json, task="digits-logreg")


def topology(name: Name, as_json: AsJson = False) -> None:
    """Write NAME.yaml, a topology."""
    text = _topology(_checked(name), "", "digits-logreg", "fedbuff, buffer_size: 2")
    _write(name, {f"{name}.yaml": text}, as_json=as_json)


def _write_class(name: str, kind: str, *, as_json: bool, **others: str) -> None:
    from testbed.own_code import is_taken

    module = _checked(name).replace("-", "_")
    if is_taken(module):
        raise BadInputError(f"{name}: Python here has a module {module} already, choose another name")
    cls = "".join(part.capitalize() for part in name.split("-"))
    own = {kind: f'"{module}:{cls}"', **others}
    code = f"code: {module}.py  # relative to this file"
    source = (_TEMPLATES / f"{kind}.py").read_text(encoding="utf-8")
    source = source.replace(f"My{kind.capitalize()}", cls)
    text = _topology(name, code, own["task"], own["rule"])
    _write(name, {f"{module}.py": source, f"{name}.yaml": text}, as_json=as_json)


def _topology(name: str, code: str, task: str, rule: str) -> str:
    text = (_TEMPLATES / "topology.yaml").read_text(encoding="utf-8")
    text = text.replace("CODE\n", f"{code}\n" if code else "")
    return _aligned(text.replace("NAME", name).replace("TASK", task).replace("RULE", rule))


def _aligned(text: str) -> str:
    """With the comments that follow something in one column."""
    lines = [line.partition("  # ") for line in text.splitlines()]
    column = max(len(content) for content, mark, _ in lines if mark)
    return "".join(
        f"{content.ljust(column) if mark else content}{mark}{rest}\n" for content, mark, rest in lines
    )


def _checked(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise BadInputError(
            f"{name!r} is no name, expected at most 40 lower-case letters, digits and -, such as my-rule"
        )
    return name


def _write(name: str, files: dict[str, str], *, as_json: bool) -> None:
    """Write all of `files`, by name, or none. Raises BadInputError where one is there."""
    if there := [file for file in files if Path(file).exists()]:
        raise BadInputError(f"{' and '.join(there)} would be overwritten: choose another name")
    for file, text in files.items():
        with Path(file).open("x", encoding="utf-8") as new:
            new.write(text)
    written([*map(Path, files)], as_json=as_json)
    if not as_json:
        remark(f"Next: testbed up {name}.yaml --runtime virtual")
