"""`testbed examples`: the topologies and notebooks that come with the testbed, to run and to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.arguments import AsJson
from testbed.console import remark, written


def add_to(app: typer.Typer) -> None:
    """Make the command known."""
    app.command(rich_help_panel="Reference")(examples)


def examples(
    folder: Annotated[Path, typer.Argument(help="Where to copy them to.")] = Path("examples"),
    as_json: AsJson = False,
) -> None:
    """Copy the topologies and notebooks that come with the testbed to a folder of yours."""
    from testbed.api import templates

    written(templates.examples(folder), as_json=as_json)
    if as_json:
        return
    remark(f"Next: testbed up {folder}/topologies/quickstart.yaml")
    remark(f"Notebooks, once `pip install jupyterlab` is done: jupyter lab {folder}/notebooks")
