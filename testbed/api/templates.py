"""Files to begin with: a task, a rule or a topology that runs unchanged, and the examples."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Literal

from testbed import bundle
from testbed.errors import BadInputError, writable_file, writable_folder
from testbed.user_code.inspector import is_taken

_TEMPLATES = Path(__file__).parents[1] / "catalog" / "new"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
_EXAMPLES = {"topologies": bundle.TOPOLOGIES, "notebooks": bundle.NOTEBOOKS}
"""Folder in the copy -> folder that is copied."""


def new(kind: Literal["task", "rule", "topology"], name: str, folder: str | Path = ".") -> list[Path]:
    """Write the topology `name`.yaml into `folder`. For a task or a rule, also write a Python file with
    its code. Return the paths of the files. Raises BadInputError if a file exists already, or `name` is
    not a valid name."""
    match kind:
        case "task":
            return _with_class(name, kind, Path(folder), rule="fedbuff, buffer_size: 2")
        case "rule":
            return _with_class(name, kind, Path(folder), task="digits-logreg")
        case "topology":
            text = _topology(_check_name(name), "", "digits-logreg", "fedbuff, buffer_size: 2")
            return _write(Path(folder), {f"{name}.yaml": text})


def examples(folder: str | Path = "examples") -> list[Path]:
    """Copy the topologies and notebooks that come with the testbed into `folder`; return the paths of
    the copies. Raises BadInputError if one of the copies exists already."""
    to = Path(folder)
    if there := [name for name in _EXAMPLES if (to / name).exists()]:
        raise BadInputError(f"{to / there[0]} exists already: name another folder")
    writable_folder(to, "")
    ignored = shutil.ignore_patterns("__pycache__", ".*", "runs")
    for name, origin in _EXAMPLES.items():
        shutil.copytree(origin, to / name, ignore=ignored)
    return [to / name for name in _EXAMPLES]


def _with_class(name: str, kind: str, folder: Path, **others: str) -> list[Path]:
    module = _check_name(name).replace("-", "_")
    if is_taken(module):
        raise BadInputError(f"{name}: Python already has a module {module}; choose another name")
    cls = "".join(word.capitalize() for word in name.split("-"))
    own = {kind: f'"{module}:{cls}"', **others}
    code = f"code: {module}.py  # relative to this file"
    source = (_TEMPLATES / f"{kind}.py").read_text(encoding="utf-8")
    source = source.replace(f"My{kind.capitalize()}", cls)
    text = _topology(name, code, own["task"], own["rule"])
    return _write(folder, {f"{name}.yaml": text, f"{module}.py": source})


def _topology(name: str, code: str, task: str, rule: str) -> str:
    text = (_TEMPLATES / "topology.yaml").read_text(encoding="utf-8")
    text = text.replace("CODE\n", f"{code}\n" if code else "")
    return _align_comments(text.replace("NAME", name).replace("TASK", task).replace("RULE", rule))


def _align_comments(text: str) -> str:
    lines = [line.partition("  # ") for line in text.splitlines()]
    column = max(len(content) for content, mark, _ in lines if mark)
    return "".join(
        f"{content.ljust(column) if mark else content}{mark}{rest}\n" for content, mark, rest in lines
    )


def _check_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise BadInputError(
            f"{name!r} is not a valid name: expected at most 40 lower-case letters, digits and -, "
            "such as my-rule"
        )
    return name


def _write(folder: Path, files: dict[str, str]) -> list[Path]:
    """Write all `files` (name -> text), or none of them. Raises BadInputError if one of the files exists
    already."""
    paths = {folder / name: text for name, text in files.items()}
    if there := [str(path) for path in paths if path.exists()]:
        raise BadInputError(f"{' and '.join(there)} would be overwritten: choose another name")
    for path in paths:
        writable_file(path, "")
    for path, text in paths.items():
        with path.open("x", encoding="utf-8") as new:
            new.write(text)
    return [*paths]
