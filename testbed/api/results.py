"""What runs came to, beside each other: tables, figures, files, trackers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agents.events import COMPLETE
from testbed import tracking
from testbed.api.running import read
from testbed.errors import BadInputError, writable_file, writable_folder
from testbed.run import live_runs
from testbed.rundir import finding
from testbed.rundir.directory import RunDirectory
from testbed.topology.units import share_as_typed as share_as_typed
from testbed.tracking import TRACKERS as TRACKERS
from testbed.tracking import processes

if TYPE_CHECKING:
    import pandas as pd

    from analysis.comparison import ComparisonRow
    from analysis.load import Run as Result


Form = Literal["parquet", "csv"]


@dataclass(frozen=True, slots=True)
class StepCosts:
    devices: pd.DataFrame
    """`testbed.fidelity.step_time.of_devices`"""
    virtual: dict[str, Any]
    """Settings of a topology's `virtual` that give virtual time these costs."""


def load_all(
    names: Iterable[str | Path], runs: str | Path = "runs", *, slim: bool = False
) -> list[Result]:
    """The tables of runs, each once: of ids, run directories, or folders of runs such as a sweep's, of
    which those that came to their end are taken. `slim`: no more of them than `compare` needs. Raises
    BadInputError."""
    given = [str(name) for name in names]
    found: dict[Path, Result] = {}
    for name in given:
        for directory in _directories(name, Path(runs)):
            path = directory.path.resolve()
            if path not in found:
                found[path] = read_slim(path) if slim else read(directory.path)
    ordered = list(found.values())
    if len(given) == 1:  # else it is the user's
        ordered.sort(key=lambda run: run.manifest.get("created") or 0.0)
    return ordered


def read_slim(path: Path) -> Result:
    """What `compare` needs of the run directory `path`. Raises BadInputError."""
    from analysis import comparison

    return comparison.slim(read(path))


def compare(found: Sequence[Result], target: float | None = None) -> list[list[ComparisonRow]]:
    """What an accuracy of `target` (None: the highest that all runs of a task reached) cost each
    configuration, over its seeds: a list of rows for each task. What is not alike, and so does not
    compare, `analysis.comparison.remarks` says."""
    from analysis import comparison

    return [
        comparison.compare(own, target or comparison.common_target(own))
        for own in comparison.by_task(found).values()
    ]


def report(found: Sequence[Result], to: str | Path = "report.html", target: float | None = None) -> Path:
    """Write one HTML file with charts, tables and all other facts about runs, which works offline; its
    path. `target` as of `compare`. Raises BadInputError without runs, or where it cannot be written."""
    from analysis import report as writer

    _check_some(found)
    path = writable_file(Path(to))
    path.write_text(writer.html(found, target), encoding="utf-8")
    return path


def draw(found: Sequence[Result], to: str | Path) -> Path:
    """Draw accuracy and timelines of runs to a .png, .pdf or .svg file; its path. Raises BadInputError
    for another name, and without runs."""
    from analysis.charts import paper, story

    _check_some(found)
    path = writable_figure(Path(to))
    paper.stack(story.story(found)).savefig(path)
    return path


def writable_figure(path: Path) -> Path:
    """`path`, where a figure can be written to. Raises BadInputError."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise BadInputError(f"--figure {path}: expected a name that ends in .png, .pdf or .svg")
    return writable_file(path, "--figure")


def step_time(found: Sequence[Result]) -> StepCosts:
    """What a training step has cost the devices of runs of one task in CPU time, and a client's start
    where there were any, so that virtual time can predict other runs of it on that host. Raises
    BadInputError where no device's speed is a share of the CPU, or the tasks differ."""
    from testbed.fidelity import step_time

    _check_some(found)
    devices = step_time.of_devices(found)
    start = step_time.start_time(found)
    return StepCosts(devices, step_time.given(step_time.fitted(devices), start))


def export(
    run: str | Path, to: str | Path | None = None, *, form: Form = "parquet", runs: str | Path = "runs"
) -> list[Path]:
    """Write the tables of a run (its id or directory), or of all runs of a sweep (its folder), to files
    in the folder `to` (None: `tables` in the run's or the sweep's); their paths. `form` is `parquet` or
    `csv`. Of a sweep each run has a folder, and the table `runs` a row for each. Raises
    BadInputError."""
    folder = finding.folder_of_runs(str(run), Path(runs))
    directories = _directories(str(run), Path(runs))
    if folder is None:
        (one,) = directories
        place = writable_folder(Path(to or one.path / "tables"))
        return [*read(one.path).export(place, form)]
    from analysis import tables

    place = writable_folder(Path(to or folder / "tables"))
    found = (read(directory.path) for directory in directories)
    return [*tables.export_runs(found, place, form)]


def track(run: str | Path, tracker: str, *, model: bool = False, runs: str | Path = "runs") -> list[str]:
    """Tell `tracker` (`mlflow`, `wandb` or `tensorboard`) of a run, or all runs of a sweep, as of
    `export`; where to find each. With `model` also of the final model. Raises BadInputError where there
    is no such tracker, RunFailedError where it takes nothing."""
    tracking.check([tracker])
    return [processes.tell(tracker, one, model=model) for one in _directories(str(run), Path(runs))]


def _check_some(found: Sequence[Result]) -> None:
    if not found:
        raise BadInputError("no runs: give one or more, as `load_all` loads them")


def _directories(name: str, runs: Path) -> list[RunDirectory]:
    """Of one run, or of all in a folder that have come to their end. Raises BadInputError."""
    folder = finding.folder_of_runs(name, runs)
    if folder is None:
        return [live_runs.located(name, runs)]
    found = [RunDirectory(path.parent) for path in sorted(folder.glob("*/manifest.json"))]
    ended = [one for one in found if one.read_manifest().get("outcome") in COMPLETE]
    if not ended:
        raise BadInputError(f"{folder}: no run of {len(found)} has ended")
    return ended
