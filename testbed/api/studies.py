"""Many runs from Python: sweeps, and agreement of virtual time with real runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.texts import name_list, quantity
from analysis import summary
from analysis.agreement import RankAgreement
from analysis.manifest import Verdict
from testbed.api import packing, results
from testbed.api.packing import OpenedPack
from testbed.api.results import read_run
from testbed.api.topology_input import data_root, plain_values
from testbed.errors import BadInputError, RunFailedError
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.traits import RUNTIMES, is_simulated, refuse_simulated

if TYPE_CHECKING:
    import pandas as pd

    from analysis.load import Run as Result
    from testbed.sweeps import Sweep


@dataclass(frozen=True)
class SweepResult:
    """Result of a sweep."""

    folder: Path
    """Folder with the run directories, and the index of finished runs for later calls."""
    paths: tuple[Path, ...]
    """Directories of the finished runs, in the order of the sweep."""
    failed: int
    """Number of runs that did not finish."""
    target: float | None
    """Target accuracy (share) that the sweep's file sets. `table` uses it by default. None if the file
    sets no target."""

    @cached_property
    def runs(self) -> tuple[Result, ...]:
        """Tables of all finished runs. All of them are in memory. Raises BadInputError if a run is
        damaged."""
        return tuple(map(read_run, self.paths))

    def table(self, target: float | None = None, baseline: str | None = None) -> pd.DataFrame:
        """Compare what each configuration needed to reach the test accuracy `target`, over all of its
        seeds, as `testbed compare` does.

        `target`: share from 0 to 1; None for the sweep's target or, if the sweep has no target, for the
        highest accuracy that all runs of the task reached. `baseline`: setting to which speed-ups refer,
        such as `fedavg` or `lr 0.1`; None for the setting of the first row.

        Returns one row per configuration, with the columns of `analysis.comparison.paper_table`."""
        from analysis import comparison

        found = [*map(results.read_slim, self.paths)]
        tasks = results.compare(found, target or self.target, baseline)
        return comparison.paper_table([row for rows in tasks for row in rows])


def sweep(
    study: str | Path | Mapping[str, Any],
    *,
    runtime: str | None = None,
    jobs: int | None = None,
    on: str = "local",
    data: str | Path | None = None,
    oversubscribe: bool = False,
    on_progress: Callable[[str], object] = lambda _: None,
    runs: str | Path = "runs",
    name: str | None = None,
    trust: bool = False,
) -> SweepResult:
    """Run a sweep and wait until it is finished. Finished runs of an earlier call are not repeated.

    `study`: a sweep file, or a mapping with the keys of such a file. In a mapping, the path `topology`
    is relative to the working directory. `jobs`: number of parallel runs in virtual time; None for one
    per core. Emulated runs are made one after the other. `on`: `local` for this machine, or a cluster
    such as `dask://HOST:PORT` or `slurm:partition=NAME`. For a cluster, `jobs` is the maximum number of
    runs that are submitted at a time. `on_progress` is called with a line per run.
    `name`: name of the folder in `runs`; None for the name of the file, or for `sweep` if `study` is a
    mapping. If `study` is a pack (`pack`), its runs are repeated; `trust`: whether programs in the pack
    may run. For the other parameters see `up`. A failed run does not stop the sweep. Ctrl-C in the main
    thread ends the runs that are in progress and keeps the finished runs. Raises BadInputError.
    """
    from testbed import sweeps
    from testbed.sweeps import clusters, sweeping

    options = Options(runtime, oversubscribe, data_root(data))
    opened = limits = None
    if packing.is_pack(study):
        opened = packing.open_pack(
            str(study), "sweep", trusted=trust, runs=runs, on_progress=on_progress
        )
        root = opened.data_root(options.data_root)
        options = replace(options, runtime=runtime or opened.index.runtime, data_root=root)
        opened.check_data(root)
        study, name, limits = opened.start, name or opened.index.name, opened.limits
    # A cluster's workers may have more cores than this machine, and check this themselves.
    planned_for = replace(options, oversubscribe=oversubscribe or clusters.parse(on) is not None)
    if isinstance(study, Mapping):
        name, told = name or "sweep", name or "sweep"
        planned = sweeps.from_mapping(plain_values(study), name, Path(), planned_for)
    else:
        told = str(study)
        planned = sweeps.load(Path(study), planned_for, limits)
    if opened is not None:
        for remark in opened.remarks():
            on_progress(remark)
    folder = Path(runs) / (name or planned.name)
    on_progress(f"{told}: {quantity(len(planned.cells), 'run')}, into {folder}")
    measured = {} if opened is None else opened.measured()
    done = sweeping.run(planned, options, folder, jobs, on_progress, on, measured)
    if opened is not None and (told_same := _comparison(opened, done)):
        on_progress(told_same)
    failed = len({cell.fingerprint for cell in planned.cells}) - len(done)
    return SweepResult(folder, tuple(one.path for one in done), failed, planned.target)


def _comparison(opened: OpenedPack, done: Sequence[RunDirectory]) -> str | None:
    """Compare each finished run with the packed run of the same cell; None if no run can be compared."""
    known = opened.run_by_cell()
    same, different = 0, list[str]()
    for directory in done:
        facts = directory.read_manifest()
        packed = known.get((facts.get("label"), facts.get("seed")))
        told = None if packed is None else opened.records_are_equal(directory.path, packed)
        if told is not None:
            same += told
            different += [] if told else [directory.run]
    if not same and not different:
        return None
    told_different = f"; {name_list(different)} differ" if different else ""
    return f"{quantity(same, 'run')} with the same records as in the pack, byte for byte{told_different}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of rankings of configurations: in virtual time, and with a real runtime."""

    rankings: Mapping[str, RankAgreement]
    """By `time` in seconds, and by further costs of all devices (`analysis.features.COSTS`), without
    those that a run did not count."""
    target: float
    """Test accuracy, 0 to 1, whose costs are ranked."""
    runtime: str
    """Name of the real runtime."""
    verdicts: Mapping[Verdict, int]
    """Verdict -> number of real runs with that verdict."""


@dataclass(frozen=True, slots=True)
class AgreeResult:
    """Result of `agree`."""

    agreement: Agreement
    real: tuple[Result, ...]
    """Runs made with the real runtime."""
    folder: Path
    """Folder with the run directories."""


def agree(
    study: str | Path,
    *,
    runtime: str = "auto",
    jobs: int | None = None,
    data: str | Path | None = None,
    oversubscribe: bool = False,
    on_progress: Callable[[str], object] = lambda _: None,
    runs: str | Path = "runs",
) -> AgreeResult:
    """Run a sweep file in virtual time and with the real `runtime`. Compare the two rankings of the
    file's configurations. For the other parameters see `sweep`. Raises BadInputError. Raises
    RunFailedError if a run failed.
    """
    from analysis import agreement, comparison
    from testbed import sweeps

    refuse_simulated(runtime)
    file, root = Path(study), data_root(data)
    simulator = next(filter(is_simulated, RUNTIMES))
    both = [Options(simulator, data_root=root), Options(runtime, oversubscribe, root)]
    studies = [sweeps.load(file, options) for options in both]
    labels = [cell.label for cell in studies[0].cells]
    if len(set(labels)) < 2:
        raise BadInputError(
            f"{file} has only the configuration {labels[0]}, so there is nothing to rank: "
            "add variants, or a grid over more than seeds"
        )
    cells = [cell.topology for cell in studies[0].cells]
    if len({(cell.task.name, repr(cell.task.data), cell.evaluate.on) for cell in cells}) > 1:
        raise BadInputError(
            f"{file} has several tasks or datasets, whose accuracies cannot be compared: "
            "make a sweep for each"
        )
    folder = Path(runs) / studies[0].name
    virtual, real = (
        _runs_with_accuracy(file, planned, options, folder, jobs, on_progress)
        for planned, options in zip(studies, both, strict=True)
    )
    target = studies[0].target or comparison.common_target([*virtual, *real])
    if target is None:
        least = comparison.percent(comparison.TARGETS[0])
        raise BadInputError(f"{file}: no run reached an accuracy of {least}: add a `target` below it")
    costs = {
        "time": agreement.times(labels, virtual, real, target),
        **agreement.other_costs(labels, virtual, real, target),
    }
    rankings = {name: agreement.agreement(table) for name, table in costs.items()}
    used = studies[1].cells[0].plan.runtime
    found = Agreement(rankings, target, used, summary.verdicts(real))
    return AgreeResult(found, tuple(real), folder)


def _runs_with_accuracy(
    file: Path,
    study: Sweep,
    options: Options,
    folder: Path,
    jobs: int | None,
    report: Callable[[str], object],
) -> list[Result]:
    """Keep the order of the sweep. Raises RunFailedError if a run failed, and BadInputError if no run
    has a test accuracy."""
    from testbed.sweeps import sweeping

    runtime = study.cells[0].plan.runtime
    report(f"{file}: {quantity(len(study.cells), 'run')} ({runtime}), into {folder}")
    done = sweeping.run(study, options, folder, jobs, report)
    if missing := len({cell.fingerprint for cell in study.cells}) - len(done):
        failed = quantity(missing, "run")
        raise RunFailedError(f"{failed} failed; `testbed agree {file}` makes the missing ones")
    index = sweeping.Index.read(folder)
    found = [read_run(one.path) for one in map(index.finished_run, study.cells) if one is not None]
    if not any(run.evaluations["accuracy"].notna().any() for run in found):
        raise BadInputError(f"{file}: no run has a test accuracy, so they cannot be ranked")
    return found
