"""Commands that write files: a task, a rule or a topology to begin with, published traces, and packs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from testbed import console
from testbed.cli import app
from testbed.cli.app import DEFAULT_RUNS, App, AsJson, DataRoot, Runs
from testbed.console import print_files, print_last_line, print_text, quantity, remark
from testbed.errors import BadInputError, writable_file

if TYPE_CHECKING:
    from testbed.api.packing import Part

# `testbed new`: write files to begin with: a task, a rule, a topology, the examples, published traces.
#
# Files for a task, a rule or a topology are commented and run unchanged. For traces see
# docs/guide/traces.md.

Name = Annotated[str, typer.Argument(help="Lower-case letters, digits and -, such as my-rule.")]
To = Annotated[Path | None, typer.Option("--to", help="File to write (default: print the result).")]


def add_to(app: typer.Typer) -> None:
    commands = App(
        help="Write files to begin with: a task, a rule, a topology, the examples, or published traces."
    )
    for command in (task, rule, topology, examples, trace, devices):
        commands.command()(command)
    app.add_typer(commands, name="new", rich_help_panel="Reference")


def task(name: Name, as_json: AsJson = False) -> None:
    """Write NAME.yaml, and a Python file with the task that it trains."""
    _write("task", name, as_json=as_json)


def rule(name: Name, as_json: AsJson = False) -> None:
    """Write NAME.yaml, and a Python file with the rule that it uses."""
    _write("rule", name, as_json=as_json)


def topology(name: Name, as_json: AsJson = False) -> None:
    """Write NAME.yaml, a topology."""
    _write("topology", name, as_json=as_json)


def _write(kind: Literal["task", "rule", "topology"], name: str, *, as_json: bool) -> None:
    from testbed.api import new

    print_files(new.new(kind, name), as_json=as_json)
    if not as_json:
        remark(f"Next: testbed up {name}.yaml --runtime virtual")


def examples(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")] = Path("examples"),
    as_json: AsJson = False,
) -> None:
    """Copy the topologies and notebooks that come with the testbed to a folder of yours."""
    from testbed.api import new

    print_files(new.examples(folder), as_json=as_json)
    if as_json:
        return
    remark(f"Next: testbed up {folder}/topologies/quickstart.yaml")
    remark(f"Notebooks, after `pip install jupyterlab`: jupyter lab {folder}/notebooks")


def trace(
    form: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            help="Format of the published trace, such as pensieve (docs/guide/traces.md).",
            autocompletion=app.trace_formats,
        ),
    ],
    file: Annotated[Path, typer.Argument(help="The trace file.", metavar="FILE")],
    to: To = None,
    direction: Annotated[
        Literal["down", "up"], typer.Option("--direction", help="Link direction that the trace is for.")
    ] = "down",
    scale: Annotated[float, typer.Option("--scale", min=1e-6, help="Factor for all rates.")] = 1.0,
) -> None:
    """Convert a published 3G, LTE, 5G or Wi-Fi trace to CSV, for link: {trace: {csv: FILE}}."""
    from testbed.api.new import convert_trace

    text = convert_trace(form, file, direction=direction, scale=scale)
    _print_or_write(text, to, "link: {trace: {csv: " + f"{to}" + "}}")


def devices(
    capacity: Annotated[
        Path, typer.Argument(help="The file client_device_capacity.", metavar="CAPACITY")
    ],
    behaviour: Annotated[
        Path | None,
        typer.Argument(
            help="The file client_behave_trace (default: devices are always available).",
            metavar="BEHAVIOUR",
        ),
    ] = None,
    count: Annotated[
        int, typer.Option("--devices", min=1, max=2000, help="How many devices to draw.")
    ] = 10,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the draw.")] = 0,
    cpu: Annotated[
        float | None, typer.Option("--cpu", min=0.001, help="Share of a core for the fastest device.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, help="Give each device a training time (timing) for this many local steps."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Samples per step.")] = 32,
    begin: Annotated[
        str, typer.Option("--from", help="Time in the availability trace to begin at, such as 6h.")
    ] = "0s",
    length: Annotated[
        str | None,
        typer.Option("--for", help="Part of the trace to use, such as 4h (default: all, repeated)."),
    ] = None,
    speed_up: Annotated[
        float,
        typer.Option("--speed-up", min=1e-3, help="Factor by which the availability trace is sped up."),
    ] = 1.0,
    topology: Annotated[
        Path | None,
        typer.Option("--topology", help="Write a copy of this topology with the drawn devices."),
    ] = None,
    to: To = None,
) -> None:
    """Draw devices from FedScale's traces: their speed, link and availability, as device groups."""
    from testbed.api.new import fedscale_devices

    text = fedscale_devices(
        capacity,
        behaviour,
        count=count,
        seed=seed,
        cpu=cpu,
        steps=steps,
        batch_size=batch_size,
        begin=begin,
        length=length,
        speed_up=speed_up,
        topology=topology,
    )
    _print_or_write(
        text, to, f"testbed plan {to}" if topology else "replace the devices of a topology with it"
    )


def _print_or_write(text: str, to: Path | None, following: str) -> None:
    if to is None:
        print_text(text.rstrip("\n"))
        return
    writable_file(to).write_text(text, encoding="utf-8")
    print_text(f"{to}: written")
    remark(f"Next: {following}")


_PARTS: tuple[Part, ...] = ("models", "telemetry", "logs", "inputs", "data")


def add_pack_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Many runs")(pack)


def pack(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run id, run directory, or a sweep's folder.",
            autocompletion=app.runs,
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
