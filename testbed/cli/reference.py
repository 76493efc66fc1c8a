"""Commands that need no run: rules, selections, tasks, profiles, this host, its speed, the images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testbed import console
from testbed.cli import app, outcome
from testbed.cli.app import DEFAULT_RUNS, App, AsJson, EmulatedRuntime, Runs
from testbed.console import print_files, print_json, print_text, quantity, remark, show, table
from testbed.errors import BadInputError

if TYPE_CHECKING:
    from rich.table import Table

    from testbed.api.catalog import CatalogEntry
    from testbed.api.machine import Finding
    from testbed.fidelity.validity import Judgement

_EXPLAINED = {"metavar": "NAME", "help": "Name to explain (default: list all)."}
Rule = Annotated[str | None, typer.Argument(**_EXPLAINED, autocompletion=app.keys_of("rules", "RULES"))]
Selection = Annotated[
    str | None, typer.Argument(**_EXPLAINED, autocompletion=app.keys_of("selection", "SELECTIONS"))
]
Task = Annotated[str | None, typer.Argument(**_EXPLAINED, autocompletion=app.keys_of("tasks", "TASKS"))]
Profile = Annotated[str | None, typer.Argument(**_EXPLAINED, autocompletion=app.profiles)]
_PANEL = "Reference"


def add_to(app: typer.Typer) -> None:
    for command in (schema, rules, selections, tasks, profiles, doctor):
        app.command(rich_help_panel=_PANEL)(command)
    images = App(help="Images for devices and broker.")
    images.command("list")(list_images)
    images.command("build")(build)
    images.command("prune")(prune)
    app.add_typer(images, name="images", rich_help_panel=_PANEL)


def schema(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help="Command whose --json output to describe, such as `ps` (default: the topology file).",
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of a topology, for editors, or of a command's --json output."""
    if command:
        from testbed.api import outputs

        print_json(outputs.schema(" ".join(command)))
        return
    from testbed.api import catalog

    print_json(catalog.schema())


def rules(name: Rule = None, as_json: AsJson = False) -> None:
    """List the aggregation rules, or explain one: paper, equation, parameters."""
    from testbed.api import catalog

    _show_catalog(catalog.rules(), "rule", name, as_json)


def selections(name: Selection = None, as_json: AsJson = False) -> None:
    """List the selections of clients for training, or explain one: paper, formulas, parameters."""
    from testbed.api import catalog

    _show_catalog(catalog.selections(), "selection", name, as_json)


def tasks(name: Task = None, as_json: AsJson = False) -> None:
    """List the learning tasks, or explain one: dataset, parameters."""
    from testbed.api import catalog

    _show_catalog(catalog.tasks(), "task", name, as_json)


def profiles(
    name: Profile = None,
    add: Annotated[
        str | None,
        typer.Option(
            "--add",
            help="Add a profile: measure this machine (a minute) and call it NAME, or read the FILE "
            "that the program of --script has written.",
            metavar="NAME|FILE",
        ),
    ] = None,
    to: Annotated[Path, typer.Option("--to", help="File that --add extends.")] = Path("profiles.yaml"),
    seconds: Annotated[
        float,
        typer.Option("--seconds", min=0.1, help="Seconds per kind of work that --add measures."),
    ] = 8.0,
    script: Annotated[
        Path | None,
        typer.Option("--script", help="Write a program that measures a device, to be copied there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List device profiles, link classes and populations, or explain one; or add a measured device."""
    if script is not None:
        _write_script(script, as_json=as_json)
    elif add is not None:
        _add_profile(add, to, seconds, as_json=as_json)
    else:
        _show_profiles(name, as_json=as_json)


def _write_script(to: Path, *, as_json: bool) -> None:
    from testbed.api import catalog

    print_files([catalog.profile_script(to)], as_json=as_json)
    if not as_json:
        remark(
            "Next: copy it to the device, which needs Python and PyTorch, and run there: "
            f"python3 {to.name} NAME; then run here: testbed profiles --add NAME.yaml"
        )


def _add_profile(name_or_file: str, to: Path, seconds: float, *, as_json: bool) -> None:
    from testbed.api import catalog

    say = (lambda _: None) if as_json else remark
    names = catalog.add_profile(name_or_file, to, seconds=seconds, on_progress=say)
    print_files([to], as_json=as_json)
    say(f"{', '.join(names)} added. In a topology in the same folder: profile: {names[0]}")


def _show_profiles(name: str | None, *, as_json: bool) -> None:
    from testbed.api import catalog

    known = catalog.profiles()
    populations = catalog.populations()
    if name is not None:
        known = known.select(name, populations)
        populations = [one for one in populations if one == name]
    if as_json:
        print_json(catalog.profile_rows(known, populations))
    else:
        print_text(catalog.profile_text(known, whole=name is not None, populations=populations))


def doctor(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST]...",
            help="Real devices to check instead, as in `hosts` of a topology: pi@raspi-1.",
        ),
    ] = None,
    clean: Annotated[
        bool,
        typer.Option("--clean", help="Remove the testbed's Python environment and files from HOST."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check what this host, or a real device, can do, and show the commands that fix what it cannot."""
    from testbed.api import machine

    if clean and not hosts:
        raise BadInputError("--clean needs the devices to clean, such as pi@raspi-1")
    findings = machine.doctor_hosts(hosts, clean=clean) if hosts else machine.doctor()
    if as_json:
        print_json(findings)
        return
    if console.fits(shown := _findings(findings, "fix")):
        console.out().print(shown)
        return
    console.out().print(_findings(findings))
    for finding in findings:
        if finding.fix is not None:  # unwrapped, so that it can be copied
            print_text(f"\n{finding.name}: {finding.fix}")


def _findings(findings: Sequence[Finding], *last: str) -> Table:
    """`last`: title of the column with the fixes. Without `last`, the table has no such column."""
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "missing": "red"}
    shown = table(["", "what", "found", *last])
    for one in findings:
        row = (one.name, one.detail, one.fix or "")[: 2 + len(last)]
        shown.add_row(Text(one.status, style=colours[one.status]), *row)
    return shown


def list_images(as_json: AsJson = False) -> None:
    """List the testbed's images on this engine, with their size and users."""
    from testbed.api import machine

    found = machine.list_images()
    if as_json:
        print_json(found)
    else:
        show([one.row for one in found], "No images. Next: testbed images build")


def prune(
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also images of your other checkouts, own code and Dockerfiles."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the images.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove unused images of the testbed: those of other versions, and leftovers of builds.

    Images of this checkout, and images that a container uses, stay. On the other nodes of a Swarm, all
    images that runs have copied there are removed; the next run copies them again. Images that nodes
    have pulled from a registry stay; `docker image prune -a` on each node removes them. Unused images of
    other users of this engine are removed, too, and those users would have to build them again.
    """
    from testbed.api import machine

    tell = remark if as_json else print_text
    gone, freed = machine.prune_images(everything=everything, dry_run=dry_run, on_progress=tell)
    if as_json:
        print_json(gone)
        return
    if dry_run:
        show([one.row for one in gone], "Nothing to remove.")
        return
    for one in gone:
        print_text(f"{one.image}: removed")
    print_text(f"{quantity(len(gone), 'image')} removed, {freed / 1e6:.0f} MB freed.")


def build(
    force: Annotated[bool, typer.Option("--force", help="Rebuild existing images.")] = False,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Also build the images for devices with a GPU (gigabytes of CUDA)."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Build missing images."""
    from testbed.api import machine
    from testbed.api.outputs import BuiltImages

    def progress(text: str) -> None:
        if not as_json:
            remark(text)

    with console.busy("Images"):
        built = machine.build_images(force=force, gpu=gpu, on_progress=progress)
    if as_json:
        print_json(BuiltImages(built.agent, built.broker, built.base, built.gpu or None))
        return
    print_text("\n".join(filter(None, (built.agent, built.broker, built.gpu))))


def _show_catalog(entries: Sequence[CatalogEntry], what: str, name: str | None, as_json: bool) -> None:
    from testbed.api import catalog

    chosen = entries if name is None else [catalog.find(name, entries, what)]
    if as_json:
        print_json(chosen if name is None else chosen[0])
    elif name is None:
        print_text("\n\n".join(map(catalog.brief, chosen)))
        remark(f"\nNext: testbed {what}s NAME explains one.")
    else:
        print_text(catalog.full(chosen[0]))


_SECTION = "virtual"
"""Section of a topology with the costs that virtual time assumes."""


def add_calibrate_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Reference")(calibrate)


def calibrate(
    costs_of: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Print the cost of a training step in these runs (or folders of runs), as settings "
            "with which virtual time predicts other runs.",
            autocompletion=app.runs,
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
    from testbed.api import machine, results
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
        print_json([outcome.finished_run(results.read_run(path)) for path in made])


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
