"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.cli import completion
from testbed.traits import RUNTIMES, runtime_names

Run = Annotated[
    str,
    typer.Argument(
        help="Run id, its beginning, or a run directory.", autocompletion=completion.runs, metavar="RUN"
    ),
]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds the run directories.")]
DEFAULT_RUNS = completion.DEFAULT_RUNS
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RuntimeName = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        help=f"{', '.join(RUNTIMES)} or auto; overrides the topology.",
        autocompletion=completion.runtimes,
    ),
]
EmulatedRuntime = Annotated[
    str,
    typer.Option(
        "--runtime",
        help=f"auto, {runtime_names(lambda t: not t.simulated)}.",
        autocompletion=completion.emulated_runtimes,
    ),
]
Oversubscribe = Annotated[
    bool,
    typer.Option(
        "--oversubscribe",
        help="Run even if the devices ask for more CPU, memory or GPUs than there are: they may be "
        "slower than requested, or be killed.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Exit with 1 if a run is not valid (a run that is not judged passes)."
    ),
]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="TESTBED_DATA",
        exists=True,
        file_okay=False,
        help="Folder with datasets as parquet files (default: download them from the hub).",
    ),
]
Page = Annotated[bool, typer.Option("--dashboard", help="Also show the run on a page in the browser.")]
PagePort = Annotated[
    int | None, typer.Option("--port", min=0, max=65535, help="Dashboard port (default: any free port).")
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", min=0, max=65535, help="Serve Prometheus metrics on this port (0: any free)."
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run the programs in a pack: own code, packages, images."),
]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", help="Also send figures to mlflow, wandb or tensorboard; repeatable."),
]
