"""`testbed pack`: a run or a sweep as one archive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from testbed import console
from testbed.cli import completion
from testbed.cli.arguments import DEFAULT_RUNS, AsJson, DataRoot, Runs
from testbed.console import print_last_line, print_text, quantity, remark
from testbed.errors import BadInputError

if TYPE_CHECKING:
    from testbed.api.packing import Part

_PARTS: tuple[Part, ...] = ("models", "telemetry", "logs", "inputs", "data")


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Many runs")(pack)


def pack(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run id, run directory, or a sweep's folder.",
            autocompletion=completion.runs,
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option("--to", help="File to write (default: the run's id with .zip, in this folder)."),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="PART",
            help=f"Also pack {', '.join(_PARTS)} (inputs: recorded for a replay); repeatable.",
        ),
    ] = None,
    data: DataRoot = None,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Write a run or a sweep to one archive, which `testbed up` or `testbed sweep` runs again elsewhere.

    A pack has topology, plan, own code, records, versions and checksums.
    """
    from testbed.api import packing

    parts = [part for part in _PARTS if part in (include or ())]
    if unknown := [one for one in include or () if one not in _PARTS]:
        raise BadInputError(f"--with {unknown[0]}: expected one of {', '.join(_PARTS)}")
    if as_json:
        console.verbosity = -1
    done = packing.pack(run, to, include=parts, data=data, on_progress=remark, runs=runs)
    if as_json:
        console.print_json(done)
        return
    for sentence in (*done.remarks, *(f"Left out: {part}" for part in done.left_out)):
        print_text(sentence)
    held = f"{quantity(len(done.runs), 'run')} in {quantity(done.files, 'file')}"
    print_text(f"{done.file}: {held}, {done.bytes / 1e6:,.1f} MB, SHA-256 {done.sha256}")
    print_last_line("", f"testbed {'sweep' if done.is_sweep else 'up'} {done.file}")
