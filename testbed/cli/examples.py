"""`testbed examples`: the topologies and notebooks that come with the testbed, to run and to change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from testbed import bundle
from testbed.cli.arguments import AsJson
from testbed.console import remark, written
from testbed.errors import BadInputError

_ORIGINS = {"topologies": bundle.TOPOLOGIES, "notebooks": bundle.NOTEBOOKS}
"""Folders, by what they are called in the copy."""


def add_to(app: typer.Typer) -> None:
    """Make the command known."""
    app.command(rich_help_panel="Reference")(examples)


def examples(
    folder: Annotated[Path, typer.Argument(help="Where to copy them to.")] = Path("examples"),
    as_json: AsJson = False,
) -> None:
    """Copy the topologies and notebooks that come with the testbed to a folder of yours."""
    if there := [name for name in _ORIGINS if (folder / name).exists()]:
        raise BadInputError(f"{folder / there[0]} is there already: name another folder")
    ignored = shutil.ignore_patterns("__pycache__", ".*", "runs")
    for name, origin in _ORIGINS.items():
        shutil.copytree(origin, folder / name, ignore=ignored)
    written([folder / name for name in _ORIGINS], as_json=as_json)
    if as_json:
        return
    remark(f"Next: testbed up {folder}/topologies/quickstart.yaml")
    remark(f"Notebooks, once `pip install jupyterlab` is done: jupyter lab {folder}/notebooks")
