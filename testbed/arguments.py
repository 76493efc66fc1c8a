"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[str, typer.Argument(help="Run id, or a run directory.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of the run directories.")]
DEFAULT_RUNS = Path("runs")
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
RuntimeName = Annotated[
    str | None,
    typer.Option("--runtime", help="docker, process, virtual or auto; overrides the topology's."),
]
Oversubscribe = Annotated[
    bool, typer.Option("--oversubscribe", help="Run even where the devices ask for more than there is.")
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="TESTBED_DATA",
        exists=True,
        file_okay=False,
        help="Folder with datasets as parquet files, else they come from the hub.",
    ),
]
