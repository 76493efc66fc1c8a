"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[str, typer.Argument(help="Run id, or a run directory.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of the run directories.")]
DEFAULT_RUNS = Path("runs")
