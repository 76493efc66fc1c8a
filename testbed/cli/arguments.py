"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.traits import RUNTIMES

Run = Annotated[str, typer.Argument(help="Run id or run directory.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds the run directories.")]
DEFAULT_RUNS = Path("runs")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RuntimeName = Annotated[
    str | None,
    typer.Option("--runtime", help=f"{', '.join(RUNTIMES)} or auto; overrides the topology."),
]
Oversubscribe = Annotated[
    bool, typer.Option("--oversubscribe", help="Run even if the devices ask for more CPU than there is.")
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Exit with 1 if a run is not valid (one that is not judged passes)."),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="TESTBED_DATA",
        exists=True,
        file_okay=False,
        help="Folder with datasets as parquet files (default: fetch them from the hub).",
    ),
]
