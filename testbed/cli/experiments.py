"""`testbed sweep`, `agree`, `compare`, `report` and `export`: many runs and their results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from testbed import console
from testbed.cli import completion
from testbed.cli.arguments import (
    DEFAULT_RUNS,
    AsJson,
    DataRoot,
    Oversubscribe,
    Runs,
    RuntimeName,
    Strict,
    located,
)
from testbed.console import closing, finite, out, print_text, remark, written
from testbed.errors import BadInputError, RunFailedError
from testbed.traits import RUNTIMES, emulated, is_simulated, those

if TYPE_CHECKING:
    from analysis import load
    from analysis.agreement import Agreement
    from analysis.comparison import Row
    from testbed.run import up
    from testbed.rundir.directory import RunDirectory
    from testbed.sweeps import Sweep

RunsGiven = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        help="Run ids, run directories, or folders of runs such as a sweep's.",
        autocompletion=completion.runs,
    ),
]
SweepFile = Annotated[Path, typer.Argument(help="The sweep file.", metavar="SWEEP")]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Parallel runs in virtual time (default: one per core).")
]
Target = Annotated[
    str | None,
    typer.Option(help="Test accuracy, such as 90% (default: the highest that all runs reached)."),
]
FigureFile = Annotated[
    Path | None, typer.Option("--figure", help="Draw accuracy and timelines (.png, .pdf or .svg).")
]


class Form(StrEnum):
    PARQUET = "parquet"
    CSV = "csv"


def add_to(app: typer.Typer) -> None:
    """Make the commands known."""
    for command in (sweep, agree, compare, report, export):
        app.command(rich_help_panel="Many runs")(command)


def sweep(
    file: SweepFile,
    runtime: RuntimeName = None,
    jobs: Jobs = None,
    oversubscribe: Oversubscribe = False,
    data: DataRoot = None,
    figure: FigureFile = None,
    strict: Strict = False,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Run a grid of topologies and seeds; finished runs are not repeated, unless they are not valid."""
    from analysis import summary
    from testbed.api import studies

    writable_figure(figure)
    done = studies.sweep(
        file,
        runtime=runtime,
        jobs=jobs,
        data=data,
        oversubscribe=oversubscribe,
        on_progress=lambda text: _print(text, quiet=as_json),
        runs=runs,
    )
    verdicts = _verdicts(done.runs)
    if done.runs:
        _compare(done.runs, done.target, as_json=as_json)
        _draw(done.runs, figure, quiet=as_json)
    if done.failed:
        if verdicts:
            _print(verdicts, quiet=as_json)
        raise RunFailedError(f"{done.failed} runs failed; `testbed sweep {file}` tries them again")
    if not as_json:
        folder = done.folder
        closing(verdicts, f"testbed report {folder} · testbed compare {folder} --figure out.pdf")
    if strict and "not valid" in summary.verdicts(done.runs):
        raise typer.Exit(1)


def agree(
    file: SweepFile,
    runtime: Annotated[
        str,
        typer.Option("--runtime", help=f"The real runtime: {', '.join(emulated())} or auto."),
    ] = "auto",
    jobs: Jobs = None,
    oversubscribe: Oversubscribe = False,
    data: DataRoot = None,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Run a sweep in virtual time and emulated, and tell whether both rank its configurations alike."""
    from analysis import agreement, comparison, summary
    from testbed import sweeps as reader
    from testbed.run import up

    if is_simulated(runtime):
        raise BadInputError(f"--runtime {runtime}: expected auto, {those(lambda t: not t.simulated)}")
    simulator = next(filter(is_simulated, RUNTIMES))
    both = [up.Options(simulator, False, data), up.Options(runtime, oversubscribe, data)]
    studies = [reader.load(file, options) for options in both]  # and all that is wrong with either
    labels = [cell.label for cell in studies[0].cells]
    if len(set(labels)) < 2:
        raise BadInputError(
            f"{file} has one configuration, {labels[0]}, and so nothing to rank: "
            "add variants, or a grid of more than seeds"
        )
    folder = runs / studies[0].name
    virtual, real = (
        _accurate(file, study, options, folder, jobs, quiet=as_json)
        for study, options in zip(studies, both, strict=True)
    )
    target = studies[0].target or comparison.common_target([*virtual, *real])
    if target is None:
        least = comparison.percent(comparison.TARGETS[0])
        raise BadInputError(f"{file}: no run reached an accuracy of {least}: add a `target` below it")
    result = agreement.agreement(agreement.times(labels, virtual, real, target))
    emulator = studies[1].cells[0].plan.runtime
    if as_json:
        told = {"target": target, "runtime": emulator, "verdicts": summary.verdicts(real)}
        console.print_json(told | finite(dataclasses.asdict(result)))
        return
    print_text(f"\nMean time to a test accuracy of {comparison.percent(target)}:")
    _show(result, emulator)
    closing(_verdicts(real), f"testbed report {folder}")


def _accurate(
    file: Path, study: Sweep, options: up.Options, folder: Path, jobs: int | None, *, quiet: bool
) -> list[load.Run]:
    """The run of each cell of `study`, in order. Raises BadInputError where none has an accuracy."""
    from testbed.sweeps import sweeping

    runtime = study.cells[0].plan.runtime
    _print(f"{file}: {len(study.cells)} runs ({runtime}), into {folder}", quiet=quiet)
    done = sweeping.run(study, options, folder, jobs, lambda text: _print(text, quiet=quiet))
    if missing := _missing(study, done):
        raise RunFailedError(f"{missing} runs failed; `testbed agree {file}` tries them again")
    index = sweeping.Index.read(folder)
    found = [_load(one.path) for one in map(index.run_of, study.cells) if one is not None]
    if not any(run.evaluations["accuracy"].notna().any() for run in found):
        raise BadInputError(f"{file}: no run has a test accuracy, by which it could be ranked")
    return found


def compare(
    given: RunsGiven,
    target: Target = None,
    figure: FigureFile = None,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Compare what it took to reach a target accuracy, over all seeds, and draw a figure."""
    share = _share(target)
    writable_figure(figure)
    found = _found(given, runs)
    _compare(found, share, as_json=as_json)
    _draw(found, figure, quiet=as_json)


def report(
    given: RunsGiven,
    to: Annotated[Path, typer.Option("--to", help="File to write.")] = Path("report.html"),
    target: Target = None,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Write one HTML file with charts, tables and all other facts about runs; it works offline."""
    from analysis import report as writer

    share = _share(target)
    found = _found(given, runs)
    to.write_text(writer.html(found, share), encoding="utf-8")
    written([to], as_json=as_json)
    if not as_json:
        remark(f"{to.stat().st_size / 1e6:.1f} MB. Next: open it in a browser")


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run id, run directory, or folder of runs such as a sweep's.",
            autocompletion=completion.runs,
        ),
    ],
    form: Annotated[Form, typer.Option("--format", help="File format.")] = Form.PARQUET,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            help="Folder to write to (default: RUN/tables), or a tracker: mlflow, wandb, tensorboard.",
        ),
    ] = None,
    model: Annotated[bool, typer.Option("--model", help="Also send the final model.")] = False,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Write the tables of a run, or of all runs of a sweep, to files; or send them to a tracker.

    Of a sweep each run has a folder, and the table `runs` has a row for each run.
    """
    from testbed import tracking
    from testbed.cli.tracking import tell
    from testbed.rundir.directory import RunDirectory

    sweep_folder = _folder_of_runs(run, runs)
    directories = (
        [located(run, runs)] if sweep_folder is None else [RunDirectory(p) for p in _ended(sweep_folder)]
    )
    if str(to) in tracking.TRACKERS:
        tracking.check([str(to)])
        where = [tell(str(to), directory, model=model) for directory in directories]
        if as_json:
            console.print_json({"tracker": str(to), "told": ", ".join(dict.fromkeys(where))})
        else:
            _print("\n".join(where))
        return
    if model:
        raise BadInputError(f"--model needs --to with a tracker, of {', '.join(tracking.TRACKERS)}")
    if sweep_folder is None:
        folder = to or directories[0].path / "tables"
        written(_load(directories[0].path).export(folder, form.value), as_json=as_json)
        return
    from analysis import tables

    found = (_load(directory.path) for directory in directories)
    written([*tables.export_runs(found, to or sweep_folder / "tables", form.value)], as_json=as_json)


def _missing(study: Sweep, done: Sequence[RunDirectory]) -> int:
    return len({cell.fingerprint for cell in study.cells}) - len(done)


def _verdicts(found: Sequence[load.Run]) -> str:
    """How many runs are valid, and so on; empty where all are simulated."""
    from analysis import summary

    counts = summary.verdicts(found)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"Verdicts: {told}" if counts.keys() - {"simulated"} else ""


def _show(result: Agreement, runtime: str) -> None:
    headings = ("virtual s", f"{runtime} s", "rank in virtual", f"rank in {runtime}")
    table = console.plain("", *headings)
    table.columns[0].justify = "left"
    for one in result.configurations:
        times = ("–" if math.isinf(time) else f"{time:.1f}" for time in (one.virtual_s, one.real_s))
        table.add_row(one.name, *times, str(one.virtual_rank), str(one.real_rank))
    out().print(table)
    if math.isnan(result.tau):
        print_text("Kendall's tau-b is not defined: all configurations tie in one of the two.")
        return
    interval = f"95% interval {result.low:.2f} to {result.high:.2f}, bootstrap over {result.resampled}"
    if math.isnan(result.low):
        interval = "too few configurations for an interval; it takes several seeds"
    print_text(f"Kendall's tau-b: {result.tau:.2f} ({interval})")
    for faster, slower in result.swapped:
        print_text(
            f"Swapped: {faster} is faster than {slower} in virtual time, and slower in {runtime}."
        )
    if not result.swapped:
        print_text("No two configurations swap.")


def _found(names: Sequence[str], runs: Path) -> list[load.Run]:
    """The runs of ids, directories, and folders of run directories. Raises BadInputError."""
    found: dict[Path, load.Run] = {}
    for name in names:
        folder = _folder_of_runs(name, runs)
        paths = [located(name, runs).path] if folder is None else _ended(folder)
        for path in paths:
            found.setdefault(path.resolve(), _load(path))
    ordered = list(found.values())
    if len(names) == 1:  # else it is the user's
        ordered.sort(key=lambda run: run.manifest.get("created") or 0.0)
    return ordered


def _ended(folder: Path) -> list[Path]:
    """The run directories in `folder` whose run has come to its end. Raises BadInputError."""
    from testbed.run import live_runs
    from testbed.rundir.directory import RunDirectory

    manifests = [RunDirectory(path.parent) for path in sorted(folder.glob("*/manifest.json"))]
    ended = [one.path for one in manifests if one.read_manifest().get("outcome") in live_runs.COMPLETE]
    if not ended:
        raise BadInputError(f"{folder}: none of its {len(manifests)} runs has ended")
    return ended


def _folder_of_runs(name: str, runs: Path) -> Path | None:
    """The folder of runs of this name, if it is one."""
    return next((path for path in (Path(name), runs / name) if _is_folder_of_runs(path)), None)


def _is_folder_of_runs(path: Path) -> bool:
    return path.is_dir() and not (path / "manifest.json").exists() and any(path.glob("*/manifest.json"))


def _load(path: Path) -> load.Run:
    from testbed.api import running

    return running.read(path)


def _compare(found: Sequence[load.Run], target: float | None, *, as_json: bool) -> None:
    from analysis import comparison

    tasks = [
        comparison.compare(own, target or comparison.common_target(own))
        for own in comparison.by_task(found).values()
    ]
    remarks = comparison.remarks(found)
    if as_json:
        rows = [finite(dataclasses.asdict(row)) for rows in tasks for row in rows]
        shared = {row["target"] for row in rows}
        told = {"target": shared.pop() if len(shared) == 1 else None, "remarks": remarks, "rows": rows}
        console.print_json(told)
        return
    for rows in tasks:
        print_text(_heading(rows, several=len(tasks) > 1))
        console.show_numbers(*comparison.texts(rows))
    for each in remarks:
        print_text(each)


def _heading(rows: Sequence[Row], *, several: bool) -> str:
    """What the table of these rows, of one task, shows."""
    from analysis import comparison

    target = rows[0].target
    told = "No test accuracy to compare by: what the runs came to"
    if not math.isnan(target):
        told = f"What it took to reach a test accuracy of {comparison.percent(target)}"
    if any(row.runs > 1 for row in rows):
        told += "; ± is half of the 95% interval over seeds"
    return f"\n{f'{rows[0].task}: ' if several else ''}{told}."


def _share(text: str | None) -> float | None:
    from testbed.topology import units

    if text is None:
        return None
    try:
        return units.share(text if text.endswith("%") else float(text))
    except ValueError:
        raise BadInputError(f"--target {text}: expected an accuracy such as 90% or 0.9") from None


def writable_figure(path: Path | None) -> None:
    """Before anything is run for it. Raises BadInputError."""
    if path is None:
        return
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise BadInputError(f"--figure {path}: expected a name that ends in .png, .pdf or .svg")
    if not path.absolute().parent.is_dir():
        raise BadInputError(f"--figure {path}: there is no folder {path.parent}; make it first")


def _draw(found: Sequence[load.Run], path: Path | None, *, quiet: bool) -> None:
    if path is None:
        return
    from analysis.charts import paper, story

    paper.stack(story.story(found)).savefig(path)
    _print(f"{path}: drawn", quiet=quiet)


def _print(text: str, *, quiet: bool = False) -> None:
    """Progress: nothing where it is `quiet`, as where JSON is printed."""
    if not quiet:
        remark(text)
