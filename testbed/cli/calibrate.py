"""`testbed calibrate`: measure this host's cores, its emulation, or the cost of training steps in
runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testbed import console
from testbed.cli import completion, outcome
from testbed.cli.arguments import DEFAULT_RUNS, AsJson, EmulatedRuntime, Runs
from testbed.console import print_json, print_text, remark
from testbed.errors import BadInputError

if TYPE_CHECKING:
    from testbed.fidelity.validity import Judgement

_SECTION = "virtual"
"""Section of a topology with the costs that virtual time assumes."""


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Reference")(calibrate)


def calibrate(
    costs_of: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Print the cost of a training step in these runs (or folders of runs), as settings "
            "with which virtual time predicts other runs.",
            autocompletion=completion.runs,
        ),
    ] = None,
    fidelity: Annotated[
        bool,
        typer.Option(
            "--fidelity",
            help="Measure how faithful the emulation is: makes runs over a grid of CPU shares and "
            "links, which takes minutes.",
        ),
    ] = False,
    runtime: EmulatedRuntime = "auto",
    force: Annotated[bool, typer.Option("--force", help="Measure the cores again.")] = False,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Measure the speed of this host's cores, the fidelity of its emulation, or the cost of training
    steps.

    Without options it measures the cores, whose speed converts device profiles to CPU shares.
    """
    if bool(costs_of) + fidelity + force > 1:
        raise BadInputError("give one of RUN, --fidelity and --force")
    if runtime != "auto" and not fidelity:
        raise BadInputError("--runtime needs --fidelity")
    if fidelity:
        _fidelity(runtime, runs, as_json=as_json)
    elif costs_of:
        _step_time(costs_of, runs, as_json=as_json)
    else:
        _cores(force=force, as_json=as_json)


def _cores(*, force: bool, as_json: bool) -> None:
    from testbed.api import machine

    found = machine.calibrate(force=force)
    if as_json:
        print_json(found.flat())
    else:
        print_text(found.summary())


def _fidelity(runtime: str, runs: Path, *, as_json: bool) -> None:
    from testbed.api import machine, reading
    from testbed.view import View

    class _FidelityView(View):
        def progress(self, message: str) -> None:
            remark(message)

        def judged(self, judgement: Judgement) -> None:
            if not as_json:
                outcome.show(judgement)

    if as_json:
        console.verbosity = -1
    made = machine.measure_fidelity(runtime, runs=runs, view=_FidelityView())
    if as_json:
        print_json([outcome.finished_run(reading.read(path)) for path in made])


def _step_time(names: Sequence[str], runs: Path, *, as_json: bool) -> None:
    from testbed.api import outputs, results

    found = results.step_time(results.load_all(names, runs))
    if as_json:
        steps: list[Any] = found.devices.drop(columns="depth").to_dict("records")
        devices = [outputs.DeviceStep(**step) for step in steps]
        print_json(outputs.StepTimes(found.virtual, devices))
        return
    rows = [
        (f"{cpu:.3g}", f"{len(own)}", f"{own['trainings'].sum()}", f"{1e3 * own['step'].mean():.3g}")
        for cpu, own in found.devices.groupby("cpu")
    ]
    headings = ("share of a core", "devices", "trainings", "ms of CPU per step")
    console.show_numbers(headings, rows[::-1])
    settings = "".join(f"\n  {name}: {json.dumps(value)}" for name, value in found.virtual.items())
    print_text(
        f"\nFor virtual time at these costs, in a topology of the same task:\n\n{_SECTION}:{settings}"
    )
