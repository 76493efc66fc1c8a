"""Results of runs: finding and loading them, tables, figures, files, trackers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agents.events import COMPLETE
from testbed import tracking
from testbed.errors import BadInputError, reading_run, writable_file, writable_folder
from testbed.rundir import finding
from testbed.rundir.directory import RunDirectory, find_run
from testbed.tracking import TRACKERS as TRACKERS

if TYPE_CHECKING:
    import pandas as pd

    from analysis.comparison import ComparisonRow
    from analysis.load import Run as Result


def read_run(path: Path) -> Result:
    """Raises BadInputError."""
    from analysis import load

    with reading_run(path):
        return load.load(path)


def locate_run(run: str, runs: Path) -> RunDirectory:
    """Errors are those of `testbed.run.live_runs.locate`."""
    if (found := find_run(run, runs)) is not None:
        return found
    from testbed.run import live_runs

    return live_runs.locate(run, runs)


Form = Literal["parquet", "csv"]
PERFETTO_FILE = "perfetto.json.gz"


@dataclass(frozen=True, slots=True)
class StepCosts:
    devices: pd.DataFrame
    """One row per run and device, with the columns of `testbed.fidelity.step_time.of_devices`."""
    virtual: dict[str, Any]
    """Settings for a topology's key `virtual`, with which virtual time assumes the costs in
    `devices`."""


def load_all(
    names: Iterable[str | Path], runs: str | Path = "runs", *, slim: bool = False
) -> list[Result]:
    """Load the tables of runs, each run once.

    `names`: run ids, run directories, or folders of runs such as the folder of a sweep. If a name is a
    folder, all finished runs in the folder are loaded. `runs`: folder in which ids are looked up.
    `slim`: whether to load only what `compare` needs. Raises BadInputError.
    """
    given = [str(name) for name in names]
    found: dict[Path, Result] = {}
    for name in given:
        for directory in _directories(name, Path(runs)):
            path = directory.path.resolve()
            if path not in found:
                found[path] = read_slim(path) if slim else read_run(directory.path)
    ordered = list(found.values())
    if len(given) == 1:  # several names keep the user's order
        ordered.sort(key=lambda run: run.manifest.get("created") or 0.0)
    return ordered


def sweep_target(names: Iterable[str | Path], runs: str | Path = "runs") -> float | None:
    """None if the sweeps have none or different ones, or if a name is a run. Raises BadInputError."""
    folders = {finding.folder_of_runs(str(name), Path(runs)) for name in names}
    if None in folders:
        return None
    from testbed.sweeps import kept_target  # imports what plans runs

    targets = {kept_target(folder) for folder in folders if folder is not None}
    return targets.pop() if len(targets) == 1 else None


def read_slim(path: Path) -> Result:
    """Load only what `compare` needs. Raises BadInputError."""
    from analysis import comparison

    return comparison.slim(read_run(path))


def share_as_typed(value: object) -> float:
    """Read a share such as `90%` or 0.9. Raises ValueError."""
    from testbed.topology import units  # imports the whole schema of topologies

    return units.share_as_typed(value)


def compare(
    results: Sequence[Result], target: float | None = None, baseline: str | None = None
) -> list[list[ComparisonRow]]:
    """Compare what each configuration needed to reach the test accuracy `target`, over all of its seeds.

    If `target` is None, it is the highest accuracy that all runs of the task reached. `baseline`:
    setting to which speed-ups refer, as in `analysis.comparison.compare`. Returns one list of rows per
    task. `analysis.comparison.remarks` reports differences that make runs incomparable. Raises
    BadInputError for a target that is no share, or if no row has the baseline's setting."""
    from analysis import comparison

    _check_target(target)
    tasks, refused = [], []
    for own in comparison.by_task(results).values():
        level = target or comparison.common_target(own)
        try:
            tasks.append(comparison.compare(own, level, baseline))
        except ValueError as error:
            refused.append(error)
            tasks.append(comparison.compare(own, level))
    if refused and len(refused) == len(tasks):
        raise BadInputError(f"baseline: {refused[0]}")
    return tasks


def write_table(tasks: Sequence[Sequence[ComparisonRow]], to: str | Path, *, given: bool = True) -> Path:
    """The file type is .csv (all figures), .md (Markdown) or .tex (LaTeX with the package booktabs).
    `given`: whether you set the target. Raises BadInputError for another file type."""
    from analysis import comparison

    path = writable_table(Path(to))
    write = comparison.TABLE_FORMATS[path.suffix]
    path.write_text(write([row for rows in tasks for row in rows], given), encoding="utf-8")
    return path


def writable_table(path: Path) -> Path:
    """Raises BadInputError."""
    from analysis import comparison

    if path.suffix not in comparison.TABLE_FORMATS:
        raise BadInputError(f"--table {path}: expected a name that ends in .csv, .md or .tex")
    return writable_file(path, "--table")


def report(
    results: Sequence[Result], to: str | Path = "report.html", target: float | None = None
) -> Path:
    """Write an HTML report with charts, tables and facts about runs; return its path. The report works
    offline. `target`: test accuracy to reach; None for the highest accuracy that all runs of the task
    reached. Raises BadInputError if there are no runs, or if the file cannot be written."""
    from analysis import report as writer

    _check_target(target)
    _check_some(results)
    path = writable_file(Path(to))
    path.write_text(writer.html(results, target), encoding="utf-8")
    return path


def draw(
    results: Sequence[Result],
    to: str | Path,
    *,
    chart: str | None = None,
    target: float | None = None,
) -> Path:
    """Draw runs to a .png, .pdf or .svg file; return the file's path.

    `chart`: a name in `analysis.charts.CHARTS`; None for accuracy and timelines. `target`: test accuracy
    of the chart `target-reached`; None for the highest accuracy that all runs reached. Raises
    BadInputError for another file type or an unknown chart, or if there are no runs.
    """
    from analysis.charts import CHARTS, paper, story
    from analysis.charts.learning_curves import target_reached

    _check_target(target)
    _check_some(results)
    path = writable_figure(Path(to))
    if chart is None:
        figure = paper.stack(story.story(results))
    else:
        draws = CHARTS[known_chart(chart)]
        reached = chart == "target-reached"
        figure = paper.draw(target_reached(results, target) if reached else draws(results))
    figure.savefig(path)
    return path


def known_chart(name: str) -> str:
    """Raises BadInputError."""
    from analysis.charts import CHARTS

    if name not in CHARTS:
        raise BadInputError(f"--chart {name}: expected one of {', '.join(CHARTS)}")
    return name


def writable_figure(path: Path) -> Path:
    """Raises BadInputError."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise BadInputError(f"--figure {path}: expected a name that ends in .png, .pdf or .svg")
    return writable_file(path, "--figure")


def step_time(results: Sequence[Result]) -> StepCosts:
    """Return the CPU time of a training step in runs of one task. If clients were restarted, also return
    the time of a client start.

    With these costs, virtual time can predict other runs of the task on the host of `results`. Raises
    BadInputError if no device's speed is a share of the CPU, or if the tasks differ.
    """
    from testbed.fidelity import step_time

    _check_some(results)
    devices = step_time.of_devices(results)
    start = step_time.start_time(results)
    return StepCosts(devices, step_time.virtual_settings(step_time.fit(devices), start))


def export(
    run: str | Path, to: str | Path | None = None, *, form: Form = "parquet", runs: str | Path = "runs"
) -> list[Path]:
    """Write the tables of a run, or of all finished runs of a sweep, to files; return the files' paths.

    `run`: id or directory of a run, or folder of a sweep. `to`: folder to write to; None for `tables` in
    the folder of the run or sweep. `form`: `parquet` or `csv`. For a sweep, each run gets a folder, and
    the table `runs` has one row per run. Raises BadInputError.
    """
    folder = finding.folder_of_runs(str(run), Path(runs))
    directories = _directories(str(run), Path(runs))
    if folder is None:
        (one,) = directories
        place = writable_folder(Path(to or one.path / "tables"))
        return [*read_run(one.path).export(place, form)]
    from analysis import export

    place = writable_folder(Path(to or folder / "tables"))
    found = (read_run(directory.path) for directory in directories)
    return [*export.export_runs(found, place, form)]


def export_trace(run: str | Path, *, runs: str | Path = "runs") -> list[Path]:
    """Write a trace of a run, or of each finished run of a sweep, that Perfetto opens
    (ui.perfetto.dev); return the files' paths. The file is `export.json.gz` in the run's directory.

    `run`: id or directory of a run, or folder of a sweep. Raises BadInputError.
    """
    from analysis import export

    found = _directories(str(run), Path(runs))
    return [
        export.write_trace(read_run(one.path), writable_file(one.path / PERFETTO_FILE)) for one in found
    ]


def track(run: str | Path, tracker: str, *, model: bool = False, runs: str | Path = "runs") -> list[str]:
    """Send a run, or all finished runs of a sweep, to `tracker`: `mlflow`, `wandb` or `tensorboard`.

    `run`: id or directory of a run, or folder of a sweep. `model`: whether to send the final model, too.
    Returns the place of each run in the tracker. Raises BadInputError if there is no such tracker, and
    RunFailedError if the tracker fails.
    """
    tracking.check([tracker])
    return [tracking.send_run(tracker, one, model=model) for one in _directories(str(run), Path(runs))]


def _check_target(target: float | None) -> None:
    if target is not None and not (isinstance(target, Real) and 0 <= target <= 1):
        raise BadInputError(f"target: found {target!r}, expected a share such as 0.9")


def _check_some(results: Sequence[Result]) -> None:
    if not results:
        raise BadInputError("no runs: give one or more, as `load_all` loads them")


def _directories(name: str, runs: Path) -> list[RunDirectory]:
    """One run, or all finished runs in a folder. Raises BadInputError."""
    folder = finding.folder_of_runs(name, runs)
    if folder is None:
        return [locate_run(name, runs)]
    found = [*map(RunDirectory, finding.runs_in(folder).values())]
    ended = [one for one in found if one.read_manifest().get("outcome") in COMPLETE]
    if not ended:
        raise BadInputError(f"{folder}: none of its {len(found)} runs has ended")
    return ended
