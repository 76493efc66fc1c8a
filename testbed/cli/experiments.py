"""`testbed sweep`, `agree`, `compare`, `report` and `export`: many runs and their results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from testbed import console
from testbed.cli import app
from testbed.cli.app import (
    DEFAULT_RUNS,
    AsJson,
    DataRoot,
    EmulatedRuntime,
    Oversubscribe,
    Runs,
    RuntimeName,
    Strict,
    Trust,
)
from testbed.console import out, print_files, print_last_line, print_text, quantity, remark
from testbed.errors import BadInputError, RunFailedError, writable_file

if TYPE_CHECKING:
    from analysis import load
    from analysis.agreement import RankAgreement
    from testbed.api.twins import TwinPair

RunsGiven = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        help="Run ids, run directories, or folders of runs such as a sweep's.",
        autocompletion=app.runs,
    ),
]
SweepFile = Annotated[Path, typer.Argument(help="The sweep file.", metavar="SWEEP")]
SweepOrPack = Annotated[Path, typer.Argument(help="The sweep file, or a pack.", metavar="SWEEP")]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Parallel runs in virtual time (default: one per core).")
]
Cluster = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="CLUSTER",
        help="Where the runs are made: local, dask://HOST:PORT, tcp:// or tls://HOST:PORT (Dask), or "
        "slurm:KEY=VALUE,... with options of sbatch. On a cluster, --jobs limits the number of runs "
        "that are submitted at the same time.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="Test accuracy, such as 90% (default: the sweep's, else the highest that all runs reached)."
    ),
]
FigureFile = Annotated[
    Path | None, typer.Option("--figure", help="Draw accuracy and timelines (.png, .pdf or .svg).")
]
ChartName = Annotated[
    str | None,
    typer.Option(
        "--chart",
        help="Chart that --figure draws in place of accuracy and timelines, such as target-reached.",
    ),
]
TableFiles = Annotated[
    list[Path] | None,
    typer.Option("--table", help="Write the table to a .csv, .md or .tex file. Repeatable."),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        help="Setting to which speed-ups refer, such as fedavg or 'lr 0.1' (default: that of the first "
        "row). Each row is compared with the row that has this setting and is otherwise alike."
    ),
]

_PANEL = "Many runs"
_FASTER = ("is faster", "slower")
"""Words on two configurations ranked by time."""


def add_to(app: typer.Typer) -> None:
    for command in (sweep, agree, twin, compare, report, export):
        app.command(rich_help_panel=_PANEL)(command)


def sweep(
    file: SweepOrPack,
    runtime: RuntimeName = None,
    jobs: Jobs = None,
    on: Cluster = "local",
    oversubscribe: Oversubscribe = False,
    data: DataRoot = None,
    figure: FigureFile = None,
    table: TableFiles = None,
    baseline: Baseline = None,
    strict: Strict = False,
    trust: Trust = False,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Run a grid of topologies and seeds. Finished runs are not repeated, unless they are not valid."""
    from analysis import summary
    from testbed.api import results, studies

    _check_writable(figure, table)
    with _explaining_interrupt(quiet=as_json):
        done = studies.sweep(
            file,
            runtime=runtime,
            jobs=jobs,
            on=on,
            data=data,
            oversubscribe=oversubscribe,
            on_progress=lambda text: _print(text, quiet=as_json),
            runs=runs,
            trust=trust,
        )
    found = [*map(results.read_slim, done.paths)] if figure is None else [*done.runs]
    verdicts = _verdicts(found)
    if found:
        _compare(found, done.target, baseline, table, as_json=as_json)
        _draw(found, figure, quiet=as_json)
    if done.failed:
        if verdicts:
            _print(verdicts, quiet=as_json)
        failed = quantity(done.failed, "run")
        raise RunFailedError(f"{failed} failed; `testbed sweep {file}` makes the missing ones")
    if not as_json:
        folder = done.folder
        print_last_line(
            verdicts,
            f"testbed report {folder} · testbed compare {folder} --table out.tex --figure out.pdf",
        )
    if strict and "not valid" in summary.verdicts(found):
        raise typer.Exit(1)


def agree(
    file: SweepFile,
    runtime: EmulatedRuntime = "auto",
    jobs: Jobs = None,
    oversubscribe: Oversubscribe = False,
    data: DataRoot = None,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Run a sweep in virtual time and emulated, and compare how both rank its configurations."""
    from analysis import comparison, features
    from testbed.api import studies

    with _explaining_interrupt(quiet=as_json):
        found = studies.agree(
            file,
            runtime=runtime,
            jobs=jobs,
            data=data,
            oversubscribe=oversubscribe,
            on_progress=lambda text: _print(text, quiet=as_json),
            runs=runs,
        )
    told = found.agreement
    if as_json:
        console.print_json(told)
        return
    for name, ranks in told.rankings.items():
        cost = features.COSTS.get(name)
        title, unit = (name, "s") if cost is None else (cost.label, cost.unit)
        print_text(f"\nMean {title} to a test accuracy of {comparison.percent(told.target)}:")
        _show(ranks, told.runtime, unit, words=(cost and cost.words) or _FASTER)
    print_last_line(_verdicts(found.real), f"testbed report {found.folder}")


def twin(
    given: RunsGiven,
    runtime: RuntimeName = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Only write the topology and its profiles to this folder."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the topology and its profiles.")
    ] = False,
    target: Target = None,
    oversubscribe: Oversubscribe = False,
    data: DataRoot = None,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Emulate the devices of runs as they were measured in them, and compare each run with its twin.

    The runs may have real devices, or be any other runs. A twin has the step times, rates and delays of
    its run. For several configurations, the command says whether runs and twins rank them alike.
    """
    from testbed.api import results, twins

    share = _share(target, given, runs)

    def report(text: str) -> None:
        _print(text, quiet=as_json)

    found = [run.path for run in results.load_all(given, runs, slim=True)]
    if dry_run or to is not None:
        if len(found) > 1:
            raise BadInputError("--to and --dry-run take one run")
        _write_twin(found[0], runtime, None if dry_run else to, data, as_json=as_json)
        return
    pairs = []
    with _explaining_interrupt("finished twins stay among the runs", quiet=as_json):
        for path in found:
            pair = twins.twin(
                path,
                runtime=runtime,
                target=share,
                data=data,
                oversubscribe=oversubscribe,
                on_progress=report,
                runs=runs,
            )
            pairs.append(pair)
            if not as_json:
                _show_pair(pair)
    ranked = twins.rank(pairs, share) if len(pairs) > 1 else None
    if as_json:
        ranks, level = ranked or (None, None)
        console.print_json(twins.ComparedTwins([pair.output() for pair in pairs], level, ranks))
        return
    if ranked is not None:
        from analysis import comparison

        print_text(f"\nMean time to a test accuracy of {comparison.percent(ranked[1])}:")
        _show(ranked[0], "the runs", "s", other="the twins", where="the twins")
    both = [run for pair in pairs for run in (pair.original, pair.twin)]
    print_last_line(_verdicts(both), f"testbed report {' '.join(str(one.path) for one in both)}")


def _write_twin(
    run: Path, runtime: str | None, to: Path | None, data: Path | None, *, as_json: bool
) -> None:
    """Print the topology if `to` is None."""
    from testbed.api import twins

    def report(text: str) -> None:
        _print(text, quiet=as_json)

    made = twins.make(run, runtime=runtime, data=data, on_progress=report)
    if to is None:
        print_text(f"{made.topology}\n# {twins.PROFILES}:\n{made.profiles}".rstrip())
    else:
        print_files([made.write(to)], as_json=as_json)
    for one in made.remarks:
        report(one)
    if to is not None:
        report(f"Next: testbed up {to / twins.FILE}")


def _show_pair(pair: TwinPair) -> None:
    """Print the figures of a run and of its twin, and the ranks of the devices."""
    print_text("")
    names = (pair.original.manifest["runtime"], f"twin, {pair.twin.manifest['runtime']}")
    rows = [
        [row.name, f"{row.original:.4g}", f"{row.twin:.4g}", _percent(row.difference)]
        for row in pair.figures
    ]
    console.show_numbers(["", *names, "difference"], rows)
    print_text("")
    columns = ("updates", "twin_updates", "staleness", "twin_staleness", "round", "twin_round")
    lines = [
        [str(row["device"]), *(_figure(row[key]) for key in columns)]
        for row in pair.devices.to_dict("records")
    ]
    console.show_numbers(["device", *(key.replace("_", " ") for key in columns)], lines)
    if pair.ranks is not None:
        print_text("\nDevices by seconds per update:")
        _show(pair.ranks, names[0], "s", other="twin", where="the twin", digits=3)


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:+.1f}%"


def _figure(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"


def compare(
    given: RunsGiven,
    target: Target = None,
    baseline: Baseline = None,
    figure: FigureFile = None,
    chart: ChartName = None,
    table: TableFiles = None,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Compare what configurations needed to reach a target accuracy, over all seeds.

    The results can be written as a table and as a figure for a paper.
    """
    from testbed.api import results

    share = _share(target, given, runs)
    _check_writable(figure, table)
    if chart is not None:
        if figure is None:
            raise BadInputError("--chart needs --figure, the file to draw to")
        results.known_chart(chart)
    found = results.load_all(given, runs, slim=figure is None)
    _compare(found, share, baseline, table, as_json=as_json)
    _draw(found, figure, chart, share, quiet=as_json)


def report(
    given: RunsGiven,
    to: Annotated[Path, typer.Option("--to", help="File to write.")] = Path("report.html"),
    target: Target = None,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Write one HTML file with charts, tables and facts about runs; it works offline."""
    from testbed.api import results

    writable_file(to)
    results.report(results.load_all(given, runs), to, _share(target, given, runs))
    print_files([to], as_json=as_json)
    if not as_json:
        remark(f"{to.stat().st_size / 1e6:.1f} MB. Next: open it in a browser")


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run id, run directory, or folder of runs such as a sweep's.",
            autocompletion=app.runs,
        ),
    ],
    form: Annotated[
        Literal["parquet", "csv"], typer.Option("--format", help="File format.")
    ] = "parquet",
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            help="Folder to write to (default: RUN/tables); with --model a file (default: "
            "RUN/model.pt); or a tracker: mlflow, wandb, tensorboard; or perfetto, for a timeline "
            "(RUN/perfetto.json.gz).",
        ),
    ] = None,
    model: Annotated[
        bool,
        typer.Option(
            "--model",
            help="Write the model instead of tables, as a state_dict that PyTorch loads without the "
            "testbed. A tracker gets both.",
        ),
    ] = False,
    version: Annotated[
        int | None,
        typer.Option(
            "--version", min=0, help="Version of a kept intermediate model (default: the final model)."
        ),
    ] = None,
    as_json: AsJson = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Write the tables, the model or the timeline of a run to files, or send a run to a tracker.

    A sweep can take the place of a run, except for the model. The tables of each of its runs then have a
    folder, and the table `runs` has one row per run.
    """
    from testbed.api import results
    from testbed.api.outputs import Tracked
    from testbed.api.results import TRACKERS

    if version is not None and (not model or str(to) in TRACKERS):
        raise BadInputError("--version needs --model, and a file to write the model to")
    if str(to) == "perfetto" and not model:
        traces = results.export_trace(run, runs=runs)
        print_files(traces, as_json=as_json)
        if not as_json:
            remark("Next: open it at https://ui.perfetto.dev (the file stays in your browser)")
        return
    if str(to) in TRACKERS:
        where = results.track(run, str(to), model=model, runs=runs)
        if as_json:
            console.print_json(Tracked(str(to), ", ".join(dict.fromkeys(where))))
        else:
            _print("\n".join(where))
        return
    if model:
        from testbed.api.running import attach  # imports what starts runs

        handle = attach(run, runs=runs)
        path = handle.save_model(writable_file(to or handle.path / "model.pt"), version)
        print_files([path], as_json=as_json)
        if not as_json:
            remark(f"In Python: module.load_state_dict(torch.load({str(path)!r}))")
        return
    files = results.export(run, to, form=form, runs=runs)
    if as_json:
        print_files(files, as_json=True)
        return
    for folder, count in Counter(file.parent for file in files).items():
        print_text(f"{folder}: {quantity(count, 'table')}")
    last = next(file for file in reversed(files) if file.stem in ("runs", "updates"))
    print_last_line("", f'pandas.read_{form}("{last}")')


def _verdicts(found: Sequence[load.Run]) -> str:
    """Runs per verdict; empty if all runs are simulated."""
    from analysis import summary

    counts = summary.verdicts(found)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"Verdicts: {told}" if counts.keys() - {"simulated"} else ""


def _show(
    result: RankAgreement,
    runtime: str,
    unit: str,
    *,
    other: str = "virtual",
    where: str = "virtual time",
    digits: int = 1,
    words: tuple[str, str] = _FASTER,
) -> None:
    """`runtime` and `other`: names of the two kinds of runs. `where`: name of the second kind in a
    sentence. `digits`: decimals of the costs. `words`: of the better and the worse configuration."""
    headings = (f"{other} {unit}", f"{runtime} {unit}", f"rank in {other}", f"rank in {runtime}")
    table = console.number_table("", *headings)
    table.columns[0].justify = "left"
    for one in result.configurations:
        pair = (one.predicted, one.measured)
        costs = ("–" if math.isinf(cost) else f"{cost:.{digits}f}" for cost in pair)
        table.add_row(one.name, *costs, str(one.predicted_rank), str(one.measured_rank))
    out().print(table)
    if math.isnan(result.tau):
        print_text("Kendall's tau-b is not defined: all configurations tie in one of the two.")
        return
    interval = f"95% interval {result.low:.2f} to {result.high:.2f}, bootstrap over {result.resampled}"
    if math.isnan(result.low):
        interval = "no interval: it needs several seeds, or at least three configurations"
    print_text(f"Kendall's tau-b: {result.tau:.2f} ({interval})")
    better, worse = words
    for first, second in result.swapped:
        print_text(f"Swapped: {first} {better} than {second} in {where}, but {worse} in {runtime}.")
    if not result.swapped:
        print_text("No two configurations swap.")


def _compare(
    found: Sequence[load.Run],
    target: float | None,
    baseline: str | None,
    tables: Sequence[Path] | None,
    *,
    as_json: bool,
) -> None:
    from analysis import comparison
    from testbed.api import results

    tasks = results.compare(found, target, baseline)
    remarks = comparison.remarks(found)
    files = [results.write_table(tasks, path, given=target is not None) for path in tables or ()]
    if as_json:
        every = [row for rows in tasks for row in rows]
        shared = {row.target for row in every}
        target = shared.pop() if len(shared) == 1 else None
        console.print_json(comparison.Comparison(target, remarks, every))
        return
    for rows in tasks:
        name = f"{rows[0].task}: " if len(tasks) > 1 else ""
        print_text(f"\n{name}{comparison.caption(rows, given=target is not None)}")
        console.show_numbers(*comparison.texts(rows))
    for each in remarks:
        print_text(each)
    for file in files:
        remark(f"{file}: written")


def _check_writable(figure: Path | None, tables: Sequence[Path] | None) -> None:
    """Raises BadInputError."""
    from testbed.api import results

    if figure is not None:
        results.writable_figure(figure)
    for path in tables or ():
        results.writable_table(path)


@contextmanager
def _explaining_interrupt(
    what: str = "the same command makes the remaining runs", *, quiet: bool
) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        _print(f"Interrupted: {what}", quiet=quiet)
        raise


def _share(text: str | None, given: Sequence[str], runs: Path) -> float | None:
    """If `text` is None, take the target of the sweep whose folder is `given`."""
    from testbed.api import results

    if text is None:
        return results.sweep_target(given, runs)
    try:
        return results.share_as_typed(text)
    except ValueError:
        raise BadInputError(f"--target {text}: expected an accuracy such as 90% or 0.9") from None


def _draw(
    found: Sequence[load.Run],
    path: Path | None,
    chart: str | None = None,
    target: float | None = None,
    *,
    quiet: bool,
) -> None:
    if path is None:
        return
    from testbed.api import results

    results.draw(found, path, chart=chart, target=target)
    _print(f"{path}: drawn", quiet=quiet)


def _print(text: str, *, quiet: bool = False) -> None:
    """If `quiet` is set, print nothing, because the output is JSON."""
    if not quiet:
        remark(text)
