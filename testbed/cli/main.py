"""The command line. Each command parses its arguments, calls one function of `testbed.api`, and prints
the result.

Exit codes: 0 success, 1 the run failed, 2 bad input, 130 interrupted. Text from users and programs is
printed unchanged: it is not read as markup, and lines are wrapped only on a terminal.
"""

from __future__ import annotations

import io
import itertools
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from agents.process import without_garbage_collection
from testbed import bundle, console
from testbed.cli import data, device_commands, experiments, new, outcome, reference
from testbed.cli.app import (
    DEFAULT_RUNS,
    App,
    AsJson,
    DataRoot,
    MetricsPort,
    Oversubscribe,
    Page,
    PagePort,
    Run,
    Runs,
    RuntimeName,
    Strict,
    Track,
    Trust,
    components,
    runs,
)
from testbed.console import print_json, print_last_line, print_text, quantity, remark, show
from testbed.errors import BadInputError, TestbedError, from_os_error, writable_file
from testbed.host.processes import interrupting
from testbed.traits import RUNTIMES

if TYPE_CHECKING:
    from analysis.summary import Verdict
    from testbed.api.launching import Launch

app = App(
    help="An edge-device emulation testbed with containers for asynchronous federated learning.",
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib import metadata

    try:
        print_text(f"testbed {metadata.version('edge-fl-testbed')}")
    except metadata.PackageNotFoundError:
        print_text(f"testbed, not installed: from {bundle.ROOT}")
    raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options of `testbed` itself."""


TopologyFile = Annotated[Path, typer.Argument(help="The topology file.", metavar="TOPOLOGY")]


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # some locales lack characters of our tables
    try:
        with interrupting() as interrupted:
            app(prog_name="testbed")  # completion needs this name, also for `python -m testbed`
    except TestbedError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:  # a full disk, a file that may not be read
        _fail(str(from_os_error(error)), 1)
    except KeyboardInterrupt:  # raised before or after typer handles it itself
        sys.exit(130)
    except Exception:
        if not interrupted():
            raise
        sys.exit(130)  # a library interrupted while importing has raised its own error instead


@app.command("up")
def up_command(
    topology: Annotated[
        Path | None,
        typer.Argument(help="The topology file, or a pack.", metavar="TOPOLOGY", show_default=False),
    ] = None,
    runtime: RuntimeName = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a key of the topology, such as rule.buffer_size=8 or seed=2; repeatable.",
        ),
    ] = None,
    detached: Annotated[
        bool, typer.Option("--detach", "-d", help="Return as soon as the run has started.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only print the commands for real devices."),
    ] = False,
    oversubscribe: Oversubscribe = False,
    data: DataRoot = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            help="Resume an interrupted run where it stopped.",
            autocompletion=runs,
        ),
    ] = None,
    strict: Strict = False,
    trust: Trust = False,
    runs: Runs = DEFAULT_RUNS,
    page: Page = False,
    port: PagePort = None,
    metrics_port: MetricsPort = None,
    track: Track = None,
    as_json: AsJson = False,
) -> None:
    """Launch a topology, or the run of a pack again, show the run until it ends, and clean up."""
    with without_garbage_collection():
        from testbed.api import launching, running

    if strict and detached:
        raise BadInputError("--strict needs the end of the run, but --detach does not wait for it")
    verbose = console.verbosity > 0
    if as_json:
        console.verbosity = -1
    launch = launching.plan_run(
        topology,
        runtime=runtime,
        data=data,
        oversubscribe=oversubscribe,
        track=track or (),
        dashboard=0 if page and port is None else port,  # a port alone also requests the page
        metrics=metrics_port,
        verbose=verbose,
        resume=resume,
        settings=settings or (),
        trust=trust,
        on_progress=remark,
        runs=runs,
    )
    if dry_run:
        print_text("\n".join(launch.dry_run()))
        return
    if not detached:
        if _up(launch, as_json=as_json) == "not valid" and strict:
            raise typer.Exit(1)
        return
    started = running.start(launch, on_progress=remark, detach=True)
    run = started.id
    if as_json:
        from testbed.api.outputs import StartedRun

        print_json(StartedRun(run, started.path))
        return
    print_text(f"{run} is running")
    name = _argument(started.path)
    remark(f"Next: testbed watch {name} · testbed logs {name} · testbed down {run}")


@app.command()
def down(
    run: Annotated[
        str | None,
        typer.Argument(help="Run id (`testbed ps` lists them).", autocompletion=runs),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All runs on this machine.")] = False,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """End runs, and remove their containers, networks and processes; works from any directory.

    To remove leftover files in the work/ of a run whose controller was killed, give the run's directory,
    or --runs.
    """
    from testbed.api import running

    if bool(run) == everything:  # an empty id may come from an unset variable of a script
        raise BadInputError("Give one run id (`testbed ps` lists them), or --all.")
    with console.busy("Ending runs and saving their logs"):
        ended = running.down(run or None, runs=runs)
    if as_json:
        print_json(ended)
        return
    if not ended:
        print_text("Nothing is running." if everything else f"{run}: nothing is running.")
    for each in ended:
        print_text(f"{each.run}: down")


@app.command()
def watch(run: Run, runs: Runs = DEFAULT_RUNS) -> None:
    """Watch a run, or show how it ended; `q` leaves, and the run continues."""
    from testbed.api.running import attach

    attach(run, runs=runs).watch()


@app.command()
def replay(run: Run, as_json: AsJson = False, runs: Runs = DEFAULT_RUNS) -> None:
    """Apply a run's recorded updates again, and check that the final model is bit-identical."""
    from testbed.api.running import attach

    handle = attach(run, runs=runs)
    same = handle.replay()
    if as_json:
        print_json(same)
        return
    print_text(
        f"Replayed through {same.rule}: the final model, version {same.version}, is bit-identical."
    )
    print_text(f"Nothing differs: {same}.")


@app.command()
def evaluate(
    run: Run,
    classes: Annotated[bool, typer.Option("--classes", help="Also evaluate on each class.")] = False,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            min=1,
            help="Also evaluate on each device's training data, on at most this many samples of each.",
        ),
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help="CSV file to write all figures to.")] = None,
    data: DataRoot = None,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Evaluate all models that a finished run has kept."""
    from testbed.api.handle import EvaluationRow
    from testbed.api.running import attach

    if to is not None:
        writable_file(to)
    found = attach(run, runs=runs).evaluate(data=data, classes=classes, devices=devices)
    if to is not None:
        found.to_csv(to, index=False)
    rows: list[Any] = found.to_dict("records")
    if as_json:
        print_json([EvaluationRow(**row) for row in rows])
        return
    show(rows, "No models.")


@app.command()
def ps(as_json: AsJson = False, runs: Runs = DEFAULT_RUNS) -> None:
    """List the runs that are running on this machine.

    A run in virtual time in the foreground is found only if its directory is in the folder --runs.
    """
    from testbed.api import running

    found = running.ps(runs)
    if as_json:
        print_json(found)
        return
    rows = [
        {**asdict(live), "directory": _display_path(live.directory) if live.directory else None}
        for live in found
    ]
    show(rows, "Nothing is running. Next: testbed up TOPOLOGY")


def _display_path(path: Path) -> str:
    """Relative to the working directory if `path` is inside it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


@app.command("runs")
def list_runs(
    sort: Annotated[
        str, typer.Option(help="Column to sort by, such as accuracy, duration or outcome.")
    ] = "started",
    matching: Annotated[
        str, typer.Option("--find", help="Only runs whose row contains these words.")
    ] = "",
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """List the run directories with the outcome of each run, newest last."""
    from testbed.api import running

    found = running.list_runs(runs, sort=sort, matching=matching)
    if as_json:
        print_json(found)
        return
    shown = [running.display_row(row) for row in found]
    rows = [{name: row[name] for name in row if name != "started"} for row in shown]  # the id has it
    empty = f"No runs in {runs}. Next: testbed up TOPOLOGY"
    if not rows and matching and (every := running.list_runs(runs)):
        empty = f"None of {quantity(len(every), 'run')} in {runs} contains {matching!r} in its row."
    columns = ("devices", "runtime", "task", "duration", "rule", "verdict", "outcome", "accuracy")
    spare = [name for name in columns if name != sort]
    show(rows, empty, spare=spare)
    for folder in running.list_folders(runs):
        remark(f"Runs of {folder.name}: testbed runs --runs {folder}")


_NO_ROUNDS = "(empty; devices log each round if the run is started with -v)"


@app.command()
def logs(
    run: Run,
    component: Annotated[
        str | None,
        typer.Argument(
            help="aggregator, broker, controller, router, a device, or a device group (default: all).",
            autocompletion=components,
        ),
    ] = None,
    tail: Annotated[int, typer.Option("--tail", min=1, help="Number of lines from each log.")] = 50,
    story: Annotated[
        bool,
        typer.Option("--story", help="Print a device's history: its models, updates and absences."),
    ] = False,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Print the logs of a run."""
    from testbed.api import outputs
    from testbed.api.running import attach

    handle = attach(run, runs=runs)
    if story and component is None:
        raise BadInputError("--story needs a device: testbed logs RUN DEVICE --story")
    if story and component is not None:
        found = {component: handle.story(component)}
    else:
        found = handle.all_logs(component, tail)
    if as_json:
        print_json([outputs.ComponentLog(name, text) for name, text in found.items()])
        return
    for name, text in found.items():
        console.out().print(f"── {name} ", style="bold")
        print_text(text or (_NO_ROUNDS if name in handle.devices else "(empty)"))
    if not found:
        print_text(f"{run} has no logs yet")


@app.command()
def validate(topology: TopologyFile, as_json: AsJson = False) -> None:
    """Check a topology and report all its errors."""
    from testbed.api import launching, outputs

    parsed = launching.validate(topology)
    rule, task = parsed.rule.name, parsed.task.name
    for hint in parsed.fleet.hints:
        (console.err() if as_json else console.out()).print(hint, soft_wrap=True)
    if as_json:
        print_json(outputs.ValidTopology(topology, rule, task, len(parsed.device_names)))
        return
    print_text(f"{topology}: valid ({rule} on {task})")
    remark(f"Next: testbed plan {topology}")


@app.command("plan")
def plan_command(
    topology: TopologyFile,
    runtime: RuntimeName = None,
    oversubscribe: Oversubscribe = False,
    data: DataRoot = None,
    nodes: Annotated[
        Path | None,
        typer.Option(
            "--nodes", help="File that describes the machines, for a runtime that uses several."
        ),
    ] = None,
    draw: Annotated[bool, typer.Option("--draw", help="Also print a drawing as text.")] = False,
    draw_to: Annotated[
        Path | None,
        typer.Option("--draw-to", help="Write a drawing to this SVG file.", metavar="FILE.svg"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what would be launched on this host, and the expected duration of a round."""
    from testbed.api import launching

    launch = launching.plan_run(
        topology, runtime=runtime, oversubscribe=oversubscribe, data=data, nodes=nodes
    )
    plan = launch.plan
    if draw_to is not None:
        launch.drawing(draw_to)
    if as_json:
        print_json(launch.devices())
    else:
        groups, rounds, *placed = launch.tables()
        spare = [name for name in ("quota", "local", "think", "memory") if name in groups[0]]
        show(groups, spare=spare)
        print_text("")
        show(rounds)
        for table in launch.fleet_tables():
            print_text("")
            show(table)
        if draw:
            print_text("\n" + launch.drawing())
        for table in placed:
            print_text("")
            show(table)
    for note in launch.remarks():
        (console.err() if as_json else console.out()).print(note, soft_wrap=True)
    if not as_json and plan.traits.simulated:
        print_text(
            f"{plan.runtime}: {quantity(len(plan.devices), 'device')} in simulated time. "
            f"Next: testbed up {topology}"
        )
    elif not as_json:
        total = sum(device.host_cpu for device in plan.emulated_devices)
        asking = quantity(len(plan.emulated_devices), "device asks", "devices ask")
        cores = "core" if plan.device_capacity == 1 else "cores"
        print_text(
            f"{plan.runtime}: {asking} for {total:g} of {plan.device_capacity:g} "
            f"{cores} (cpu {plan.device_cpus}); broker and aggregator use cpu "
            f"{plan.infrastructure_cpus}."
            + (f" Evaluations use cpu {plan.evaluation_cpus}." if plan.evaluation_cpus else "")
            + "".join(f" {compromise}." for compromise in plan.compromises)
        )
        print_text(launch.memory())
        if plan.shaper:
            print_text(f"Links: {plan.shaper.name} ({plan.shaper.why})")
        print_text(f"Next: testbed up {topology}")


def dashboard(
    runs_to_show: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Run ids, run directories, or a folder of runs such as a sweep's (default: all runs).",
            autocompletion=runs,
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


def _up(launch: Launch, *, as_json: bool) -> Verdict:
    """Run a topology in the foreground. At the end, print the outcome and what to do next."""
    from testbed.watching import fullscreen, live, rows

    plan = launch.plan
    if plan.traits.notice:
        auto = (launch.options.runtime or launch.topology.runtime.name) == "auto"
        remark(f"{_fallback_reason(plan.runtime) if auto else ''}{plan.traits.notice}.")
    simulated = plan.traits.simulated
    for hint in launch.hints:
        remark(hint)
    directory = launch.directory()
    shown = rows.overview_of_plan(launch.topology, plan, directory.run)
    if console.verbosity < 0:
        view: live.LiveView = live.QuietView(console.out(), shown)
    else:
        view = fullscreen.open_view(console.out(), shown, directory)
    try:
        with launch.removing_unstarted(directory):
            launch.run(directory, view)
    except BaseException:
        if not as_json:
            outcome.show(view.judgement)
        raise
    finally:
        here, path = Path.cwd(), directory.path
        if path.exists():
            remark(f"Run directory: {path.relative_to(here) if path.is_relative_to(here) else path}")
        if isinstance(sys.exc_info()[1], KeyboardInterrupt) and directory.checkpoint.exists():
            name = _argument(path)
            remark(f"Next: testbed up --resume {name} · testbed dashboard {name}")
    from analysis import summary  # imported late: pandas takes a second, which would delay the start
    from testbed.api import results, running

    run = results.read_run(directory.path)
    verdict = summary.verdict(run)
    if as_json:
        print_json(outcome.finished_run(run))
        return verdict
    console.out().print(live.render_summary(run))
    outcome.show(view.judgement)
    if simulated:
        print_text(f"{run.duration:.1f} s of virtual time in {run.manifest['timings']['real']} s")
    if launch.pack is not None:
        same = launch.pack.records_are_equal(directory.path)
        if same is not None:
            print_text(_SAME_RECORDS if same else _OTHER_RECORDS)
    if (ended := running.optimum(run)) is not None:
        print_text("\n" + "\n".join(ended.lines()))
    name = _argument(directory.path)
    logs = "" if simulated else f"testbed logs {name} · "
    told = "" if verdict == "simulated" else f"Verdict: {verdict}"
    doubtful = verdict in ("not valid", "not judged")
    help_page = "docs/guide/verdict.md says what helps"
    last = help_page if doubtful else "change the topology and run it again"
    print_last_line(told, f"testbed dashboard {name} · {logs}{last}")
    return verdict


def _argument(run: Path) -> str:
    """Id or path by which a command in this folder names the run directory."""
    is_default = run.parent.resolve() == DEFAULT_RUNS.resolve()
    return run.name if is_default else shlex.quote(_display_path(run))


_SAME_RECORDS = "The records are those of the packed run, byte for byte but for the wall clock."
_OTHER_RECORDS = "The records differ from those of the packed run."


def _fallback_reason(runtime: str) -> str:
    """Say what this host lacks for the runtimes that `auto` prefers to `runtime`; empty if nothing is
    lacking."""
    better = itertools.takewhile(lambda name: name != runtime, RUNTIMES)
    lacks = "; ".join(lack for name in better if (lack := RUNTIMES[name].lack))
    return f"{lacks[0].upper()}{lacks[1:]} (`testbed doctor` shows the fix): " if lacks else ""


def _fail(message: str, code: int) -> NoReturn:
    from rich.text import Text

    console.err().print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    sys.exit(code)


# These calls come last, because help lists commands in the order in which they were added.
data.add_to(app)
app.command()(dashboard)
device_commands.add_to(app)
experiments.add_to(app)
new.add_pack_to(app)
reference.add_calibrate_to(app)
reference.add_to(app)
new.add_to(app)
