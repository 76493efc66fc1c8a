"""The command line. Each command parses, calls one function of the product, and prints what it returns.

Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted. What a user or a program wrote is
printed as it is: never read as markup, and never broken into lines where it does not meet a terminal.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from testbed import detach, fleet, orders, rundir, up
from testbed.arguments import DEFAULT_RUNS, Run, Runs
from testbed.errors import BadInputError, TestbedError
from testbed.rundir import RunDirectory
from testbed.signals import interrupting

if TYPE_CHECKING:
    from agents import events
    from testbed.catalogue import Entry
    from testbed.plan import Plan
    from testbed.topology import Topology

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="An edge-device emulation testbed with containers for asynchronous federated learning.",
)
images_app = typer.Typer(no_args_is_help=True, help="The images that devices and broker run from.")
app.add_typer(images_app, name="images")
orders.add_to(app)


def _console(*, stderr: bool = False) -> Console:
    """A console whose tables get all the width that they want where nobody's screen sets a limit."""
    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 1000
    return console


out = _console()
err = _console(stderr=True)

TopologyFile = Annotated[Path, typer.Argument(help="The topology file.", metavar="TOPOLOGY")]
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


def main() -> None:
    """Entry point of `testbed`."""
    try:
        with interrupting():
            app()
    except TestbedError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:  # a full disk, a file that may not be read
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    except KeyboardInterrupt:  # before or after typer's own handling of it
        sys.exit(130)


@app.command("up")
def up_command(
    topology: Annotated[
        Path | None, typer.Argument(help="The topology file.", metavar="TOPOLOGY", show_default=False)
    ] = None,
    runtime: RuntimeName = None,
    detached: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once the run is going.")
    ] = False,
    oversubscribe: Oversubscribe = False,
    data: DataRoot = None,
    resume: Annotated[
        str | None, typer.Option("--resume", help="Carry on an ended run from its last checkpoint.")
    ] = None,
    runs: Runs = DEFAULT_RUNS,
    directory: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Launch a topology, watch it to its end, and take everything down."""
    options = up.Options(runtime, oversubscribe, data, resume is not None)
    chosen = RunDirectory(directory) if directory else None
    if resume is not None and topology is None:
        chosen = chosen or fleet.resumable(runs, resume)
        topology = chosen.topology
        options = replace(options, runtime=runtime or chosen.read_manifest().get("runtime"))
    elif resume is not None or topology is None:
        raise BadInputError("Name one topology file, or say --resume RUN (testbed runs shows them).")
    parsed, plan = up.planned(topology, options)
    chosen = chosen or RunDirectory.create(runs, rundir.new_run_id(parsed.name))
    if detached:
        _detach(chosen, topology, options)
    else:
        _up(parsed, plan, chosen, options)


@app.command()
def down(
    run: Annotated[str | None, typer.Argument(help="Run id; `testbed ps` shows them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every run of this machine.")] = False,
) -> None:
    """End runs and remove everything of theirs, and nothing else, from any directory."""
    if (run is None) != everything:
        raise BadInputError("Name one run (testbed ps shows them), or say --all.")
    live = [found for found in fleet.find() if everything or found.run == run]
    if not live:
        _say("Nothing is running." if everything else f"{run}: nothing is running.")
        return
    for each in live:
        fleet.take_down(each)
        _say(f"{each.run}: down")


@app.command()
def watch(run: Run, runs: Runs = DEFAULT_RUNS) -> None:
    """Look at a run that goes on, or at how one ended; `q` leaves, and the run goes on without us."""
    from testbed import watch as watching

    watching.watch(fleet.located(run, runs), out)


@app.command()
def replay(run: Run, runs: Runs = DEFAULT_RUNS) -> None:
    """Apply a run's recorded updates again, and check that the same model comes of it, bit by bit."""
    from testbed import replay as replaying

    same = replaying.replay(fleet.located(run, runs))
    _say(f"Replayed through {same.rule}: the final model, version {same.version}, is bit-identical.")
    _say(f"Nothing differs: {same}.")


@app.command()
def ps(as_json: AsJson = False) -> None:
    """Show the runs that live on this machine."""
    rows = [
        {
            "run": live.run,
            "runtime": live.runtime,
            "parts": live.parts,
            "directory": str(live.directory) if live.directory else None,
        }
        for live in fleet.find()
    ]
    _show(rows, as_json, "Nothing is running. Next: testbed up TOPOLOGY")


@app.command("runs")
def list_runs(as_json: AsJson = False, runs: Runs = DEFAULT_RUNS) -> None:
    """Show the run directories, newest last."""
    rows = rundir.listing(runs)
    if not as_json:  # the run id carries the date already
        rows = [{name: value for name, value in row.items() if name != "created"} for row in rows]
    _show(rows, as_json, f"No run in {runs}. Next: testbed up TOPOLOGY")


@app.command()
def logs(
    run: Run,
    part: Annotated[
        str | None, typer.Argument(help="aggregator, broker, or a device; else all.")
    ] = None,
    tail: Annotated[int, typer.Option("--tail", min=1, help="Lines of each.")] = 50,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Print what the processes of a run said."""
    from testbed import logs as reader

    for name, text in reader.read(run, part, runs, tail):
        out.print(f"── {name} ", style="bold")
        _say(text or "(silent)")


@app.command()
def validate(topology: TopologyFile) -> None:
    """Check a topology; all its errors at once."""
    from testbed.resolution import resolved
    from testbed.topology import load

    parsed = resolved(load(topology))
    _say(f"{topology}: valid ({parsed.rule.name} on {parsed.task.name}). Next: testbed plan {topology}")


@app.command("plan")
def plan_command(
    topology: TopologyFile,
    runtime: RuntimeName = None,
    oversubscribe: Oversubscribe = False,
    as_json: AsJson = False,
) -> None:
    """Show what would be launched on this host."""
    from testbed.plan import describe

    _, plan = up.planned(topology, up.Options(runtime, oversubscribe))
    _show(describe(plan), as_json, "")
    if not as_json and plan.runtime == "virtual":
        _say(f"virtual: {len(plan.devices)} devices in simulated time. Next: testbed up {topology}")
    elif not as_json:
        asked = sum(device.share for device in plan.devices)
        _say(
            f"{plan.runtime}: {len(plan.devices)} devices ask for {asked:g} of {plan.device_capacity:g} "
            f"cores (cpu {plan.device_cpus}); broker and aggregator use cpu {plan.infrastructure_cpus}. "
            + (f"A second takes {plan.dilation:g} s here. " if plan.dilation != 1 else "")
            + (f"Links by {plan.shaper.name} ({plan.shaper.why}). " if plan.shaper else "")
            + f"Next: testbed up {topology}"
        )


@app.command()
def schema() -> None:
    """Print the JSON Schema of a topology, for editors."""
    from testbed.topology import json_schema

    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


RuleOrTask = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="The one to explain; else all are listed.")
]


@app.command("rules")
def rules_command(name: RuleOrTask = None, as_json: AsJson = False) -> None:
    """Show the aggregation rules, or explain one: paper, equation, parameters."""
    from testbed import catalogue

    _show_catalogue(catalogue.rules(), "rule", name, as_json)


@app.command("tasks")
def tasks_command(name: RuleOrTask = None, as_json: AsJson = False) -> None:
    """Show the learning tasks, or explain one: dataset, parameters."""
    from testbed import catalogue

    _show_catalogue(catalogue.tasks(), "task", name, as_json)


@app.command("profiles")
def profiles_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The one to explain; else all are listed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show device profiles and link classes, or explain one: figures and where they are from."""
    from testbed import profiles

    known = profiles.load(Path())
    shown = known if name is None else known.only(name)
    if as_json:
        _show(profiles.rows(shown), as_json=True, empty="")
    else:
        _say(profiles.listing(shown) if name is None else profiles.explained(shown))


@app.command()
def calibrate(
    force: Annotated[bool, typer.Option("--force", help="Measure anew what is known.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this host's cores, so that a device's profile becomes a CPU share."""
    from testbed import calibration

    found = calibration.calibrate(anew=force)
    if as_json:
        sys.stdout.write(json.dumps(found.as_dict(), indent=2) + "\n")
    else:
        _say(found.summary())


@app.command()
def fidelity(runtime: RuntimeName = None, runs: Runs = DEFAULT_RUNS) -> None:
    """Measure how faithful the emulation is on this host, over a grid of CPU shares and links."""
    from testbed import selfcheck

    for outcome in selfcheck.run(runtime, runs, _Progress()):
        _show_fidelity(outcome)


class _Progress:
    """Implements `testbed.controller.View`: how launching and ending go on, and nothing else."""

    def progress(self, message: str) -> None:
        _say(message)

    def record(self, record: events.Record) -> None: ...

    def refresh(self, now: float) -> None: ...


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Examine what this host can do, with the command that mends what it cannot."""
    from testbed.doctor import examine

    findings = examine()
    if as_json:
        _show([vars_of(finding) for finding in findings], as_json=True, empty="")
        return
    colours = {"ok": "green", "warn": "yellow", "missing": "red"}
    table = _table(["", "what", "found", "mend"])
    for finding in findings:
        mark = Text(finding.status, style=colours[finding.status])
        table.add_row(mark, finding.name, finding.detail, finding.mend or "")
    out.print(table)


@images_app.command()
def build(
    force: Annotated[bool, typer.Option("--force", help="Build anew what is there.")] = False,
) -> None:
    """Build the images that are missing."""
    from testbed import engine, images

    client = engine.connect()
    try:
        built = images.build(client, _say, force=force)
    finally:
        client.close()
    _say(f"{built.agent}\n{built.broker}")


def _show_fidelity(outcome: up.Outcome) -> None:
    """What the devices got of what was asked, and whether to believe the run."""
    from testbed import fidelity_table

    if outcome.fidelity is not None:
        out.print(fidelity_table.render(outcome.fidelity))
    if outcome.validity is not None and not outcome.validity.valid:
        out.print("\nNot valid:", style="bold red")
        for reason in outcome.validity.reasons:
            _say(f"  {reason}")


def _up(topology: Topology, plan: Plan, directory: RunDirectory, options: up.Options) -> None:
    """Run in the foreground, and say at the end what came of it and what to try next."""
    from testbed import fullscreen, live, overview

    shown = _relative(directory.path)
    if plan.runtime == "process":
        auto = (options.runtime or topology.runtime.name) == "auto"
        why = "No Docker engine answers (testbed doctor tells the mend): " if auto else ""
        _say(
            f"{why}devices are local processes. CPU shares are kept by stopping and continuing them, "
            "links by a relay; memory is not limited."
        )
    virtual = plan.runtime == "virtual"
    try:
        with fullscreen.view(out, overview.of_plan(topology, plan, directory.run), directory) as view:
            outcome = up.run(topology, plan, directory, options, view)
    finally:
        _say(f"Run directory: {shown}")
    from analysis.load import load  # pandas: a second, when nobody waits for a run to begin
    from testbed.optimum import ending

    run = load(directory.path)
    out.print(live.render_summary(run))
    _show_fidelity(outcome)
    if virtual:
        _say(f"{run.duration:.1f} s of virtual time in {run.manifest['timings']['real']} s")
    if (ended := ending(run)) is not None:
        _say("\n" + "\n".join(ended.lines()))
    logs = "" if virtual else f"testbed logs {directory.run} · "
    _say(f"Next: testbed runs · {logs}change the topology and run it again")


def _detach(directory: RunDirectory, topology: Path, options: up.Options) -> None:
    """Run in the background; an error before the start has been told by the controller itself."""
    if code := detach.start(directory, topology, options, _say):
        raise typer.Exit(code)
    run = directory.run
    _say(f"{run} is running. Next: testbed watch {run} · testbed logs {run} · testbed down {run}")


def _show_catalogue(entries: list[Entry], what: str, name: str | None, as_json: bool) -> None:
    from testbed import catalogue

    chosen = entries if name is None else [catalogue.find(name, entries, what)]
    if as_json:
        found = [entry.as_dict() for entry in chosen]
        sys.stdout.write(json.dumps(found if name is None else found[0], indent=2) + "\n")
    elif name is None:
        _say("\n\n".join(map(catalogue.brief, chosen)))
        _say(f"\nNext: testbed {what}s NAME explains one.")
    else:
        _say(catalogue.full(chosen[0]))


def _say(text: str) -> None:
    out.print(text, soft_wrap=True)


def _fail(message: str, code: int) -> NoReturn:
    err.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    sys.exit(code)


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def vars_of(finding: Any) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in ("name", "status", "detail", "mend")}


def _show(rows: list[dict[str, Any]], as_json: bool, empty: str) -> None:
    """Rows as an aligned table for people, or as JSON for programs."""
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    elif not rows:
        _say(empty)
    else:
        table = _table(list(rows[0]))
        for row in rows:
            table.add_row(*("–" if value is None else str(value) for value in row.values()))
        out.print(table)


def _table(columns: list[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table
