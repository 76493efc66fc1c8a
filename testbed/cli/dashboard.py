"""`testbed dashboard`: runs in the browser."""

from __future__ import annotations

from typing import Annotated

import typer

from testbed.cli import app
from testbed.cli.app import DEFAULT_RUNS, Runs


def add_to(app: typer.Typer) -> None:
    app.command()(dashboard)


def dashboard(
    runs_to_show: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Run ids, run directories, or a folder of runs such as a sweep's (default: all runs).",
            autocompletion=app.runs,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Dashboard port (0: any free port).")
    ] = 0,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Show live and finished runs in the browser, one or several side by side; Ctrl-C stops the
    server."""
    from testbed.api import running

    with running.page(runs_to_show or (), port=port, on_progress=typer.echo, runs=runs) as page:
        raise typer.Exit(page.wait())
