"""Runs from Python: one run, a run in virtual time, sweeps, and agreement of runtimes."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.texts import name_list, quantity
from analysis import summary
from analysis.agreement import RankAgreement, RankedConfiguration
from analysis.manifest import Verdict
from testbed.api import launching, packing, results
from testbed.api.handle import OnEvent, RunHandle
from testbed.api.launching import Launch, plan_run
from testbed.api.packing import OpenedPack
from testbed.api.results import read_run
from testbed.api.topology_input import TopologyLike, data_root, plain_values, text_of
from testbed.dashboard import serving
from testbed.errors import BadInputError, HostError, RunFailedError, TestbedError, from_os_error
from testbed.run import live_runs
from testbed.run.options import Options
from testbed.rundir import finding
from testbed.rundir.directory import RunDirectory
from testbed.runtimes import LiveRun
from testbed.traits import RUNTIMES, is_simulated, refuse_simulated
from testbed.user_code import inspector
from testbed.view import View

if TYPE_CHECKING:
    import pandas as pd

    from analysis.load import Run as Result
    from testbed.run.optimum import OptimumComparison
    from testbed.rundir.listing import RunRow
    from testbed.sweeps import Sweep


def up(
    topology: TopologyLike,
    *,
    runtime: str | None = None,
    on_event: OnEvent | None = None,
    on_progress: Callable[[str], object] | None = None,
    data: str | Path | None = None,
    oversubscribe: bool = False,
    track: Sequence[str] = (),
    runs: str | Path = "runs",
    detach: bool = False,
    trust: bool = False,
) -> RunHandle:
    """Launch `topology` and return as soon as the run clock has started, as `testbed up -d` does.

    `topology`: path of a file, its content as text or mapping, or a `Topology`. `runtime`: `docker`,
    `swarm`, `process`, `virtual` or `auto`; None for the topology's choice. `on_event`: called with each
    record (`testbed.events`) in order, in a separate thread. If the function raises an exception, the
    calls stop, and `wait` raises the exception. `on_progress`: called with progress lines. `data`:
    folder with datasets as parquet files; None for the folder that TESTBED_DATA names, or for the hub if
    TESTBED_DATA is not set. `oversubscribe`: whether to run even if the devices request more CPU than
    there is. `track`: trackers that receive the run: `mlflow`, `wandb`, `tensorboard`. `runs`: folder in
    which the run directory is made. `detach`: whether the run continues when this process ends. If
    `topology` is a pack (`pack`), its run is repeated; `trust`: whether programs in the pack may run.

    The run is a separate process. `down` takes the run down, and so does the end of a `with` block.
    Unless `detach` is set, the run is also taken down when this process ends for any reason. Raises
    BadInputError, HostError, RunFailedError.
    """
    launch = plan_run(
        topology,
        runtime=runtime,
        data=data,
        oversubscribe=oversubscribe,
        track=track,
        trust=trust,
        on_progress=on_progress or (lambda _: None),
        runs=runs,
    )
    return start(launch, on_event=on_event, on_progress=on_progress, detach=detach)


def start(
    launch: Launch,
    *,
    on_event: OnEvent | None = None,
    on_progress: Callable[[str], object] | None = None,
    detach: bool = False,
) -> RunHandle:
    """Start a run that `plan_run` has planned. For the parameters and errors see `up`."""
    directory = launch.directory()
    report = (lambda _: None) if on_progress is None else on_progress
    for hint in launch.hints:
        report(hint)
    with launch.removing_unstarted(directory):
        controller = launching.start_run(launch, directory, report, tied=not detach)
    return RunHandle(directory, None if detach else controller, on_event)


def attach(run: str | Path, *, on_event: OnEvent | None = None, runs: str | Path = "runs") -> RunHandle:
    """Return the handle of a run that was started elsewhere, or is over. The run continues when this
    process ends.

    `run`: run id, run directory, or the beginning of an id. Only one run, or only one live run, may have
    that beginning. Raises BadInputError if there is no such run.
    """
    return RunHandle(live_runs.locate(str(run), Path(runs), live=True), None, on_event)


def load(run: str | Path | RunHandle, *, runs: str | Path = "runs") -> Result:
    """Load the records of a run as tables (docs/guide/analysis.md). For a live run, load the records so
    far.

    `run`: run id, run directory or handle. Raises BadInputError if there is no such run, or if its
    directory is damaged.
    """
    if isinstance(run, RunHandle):
        return run.result
    return read_run(live_runs.locate(str(run), Path(runs)).path)


def ps(runs: str | Path = "runs") -> list[LiveRun]:
    """Return the runs that have running or leftover processes, containers or networks on this machine,
    sorted by name. Runs that consist only of a controller in the foreground (virtual time) are found in
    the folder `runs`."""
    return live_runs.find_all_runs(Path(runs))


def down(run: str | Path | None, *, runs: str | Path = "runs") -> list[LiveRun]:
    """End `run` (id, beginning of an id, or directory; None for all runs on this machine) and remove its
    containers, networks and processes. Returns the runs that were ended.

    Raises BadInputError if there is no such run. Raises HostError if a container, network or process may
    remain. The error's message names the runs concerned. All other runs have been ended.
    """
    inspector.remove_leftovers()
    given = None if run is None else str(run)
    found = {left.run: left for left in live_runs.leftovers(given, Path(runs))}
    found |= {live.run: live for live in live_runs.find_live_runs()}
    named = None if given is None else finding.complete_id(Path(given).name, found)
    if given is not None and named is None:
        live_runs.locate(given, Path(runs))  # raises BadInputError unless the run has ended
    ended = [one for one in found.values() if given is None or one.run == named]
    failures = []
    for each in ended:
        try:
            live_runs.take_down(each)
        except (TestbedError, OSError) as error:
            failures.append(str(from_os_error(error) if isinstance(error, OSError) else error))
    if failures:
        raise HostError("\n".join(failures))
    return ended


def list_runs(runs: str | Path = "runs", *, sort: str = "started", matching: str = "") -> list[RunRow]:
    """Return one row per run directory in the folder `runs`, with its outcome. `sort`: column to sort
    by. `matching`: words that a returned row must contain; empty for all rows. Raises BadInputError."""
    from testbed.rundir.listing import SORTS, list_runs, select_rows

    if sort not in SORTS:
        raise BadInputError(f"--sort {sort}: expected one of {', '.join(SORTS)}")
    return select_rows(list_runs(Path(runs)), sort, matching)


def display_row(row: RunRow) -> dict[str, str]:
    from testbed.rundir import listing

    return listing.text_row(row)


def list_folders(runs: str | Path = "runs") -> list[Path]:
    """Return the folders of runs in `runs`, such as folders of sweeps. `list_runs` does not list the
    runs in these folders."""
    return finding.folders_of_runs(Path(runs))


@contextmanager
def page(
    shown: Iterable[str | Path] = (),
    *,
    port: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
    runs: str | Path = "runs",
) -> Iterator[subprocess.Popen[bytes]]:
    """Serve the dashboard in a separate process during the `with` block; yield that process.

    `shown`: runs to show, or a single folder of runs such as the folder of a sweep. The runs of a single
    folder are listed. If `shown` is empty, all runs in the folder `runs` are listed. `port`: port to
    listen on; 0 for any free port. `on_progress` is called with the address. Raises BadInputError.
    """
    names = [str(run) for run in shown]
    if len(names) == 1 and (folder := finding.folder_of_runs(names[0], Path(runs))) is not None:
        names, runs = [], folder
    named = [live_runs.locate(name, Path(runs)) for name in names]
    if not named and not Path(runs).is_dir():
        raise BadInputError(f"no such folder: {runs}. Name one with --runs, or name a run")
    with serving.serve_page(named, port, on_progress, runs=Path(runs)) as process:
        yield process


def optimum(run: Result) -> OptimumComparison | None:
    """None if the optimum of the task is not known."""
    from testbed.run.optimum import compare_with_optimum

    return compare_with_optimum(run)


def simulate(
    topology: TopologyLike, *, runs: str | Path = "runs", data: str | Path | None = None, **changes: Any
) -> Result:
    """Run `topology` (see `up`) in virtual time in this process, to its end; return the run's tables.

    `runs`: folder in which the run directory is made. `data`: folder with datasets as parquet files;
    None for the folder that TESTBED_DATA names, if it is set. Missing datasets are downloaded from the
    hub. `changes`: new values of top-level entries of the topology, such as `seed=3` or `rule={"name":
    "fedavg"}`. A process cannot make several runs at the same time. For parallel runs, use `sweep`, or
    `up` with `runtime="virtual"`. Raises BadInputError, HostError, RunFailedError.
    """
    given = text_of(topology, changes)
    launch = plan_run(given, runtime="virtual", data=data, runs=runs)
    # tqdm, a part of the extra `datasets`, warns in notebooks without widgets, which we do not use.
    with suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tqdm.auto  # noqa: F401
    directory = launch.directory()
    with launch.removing_unstarted(directory):
        launch.run(directory, View())
    return read_run(directory.path)


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
class RankedByTime:
    """Times and ranks of a configuration in virtual time and with the real runtime."""

    name: str
    virtual_s: float
    """Mean time to the target in virtual time, in seconds; NaN if a seed did not reach the target."""
    real_s: float
    """Mean time to the target with the real runtime, in seconds; NaN if a seed did not reach it."""
    virtual_rank: int
    real_rank: int


@dataclass(frozen=True, slots=True)
class RankedByEnergy:
    """Energies and ranks of a configuration in virtual time and with the real runtime."""

    name: str
    virtual_j: float
    """Mean energy of all devices to the target in virtual time, in joules; NaN if a seed did not reach
    the target."""
    real_j: float
    """Mean energy of all devices to the target with the real runtime, in joules; NaN if a seed did not
    reach the target."""
    virtual_rank: int
    real_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement(RankAgreement[RankedByTime]):
    """Agreement of two rankings of configurations: in virtual time, and with a real runtime."""

    configurations: tuple[RankedByTime, ...]
    target: float
    """Target accuracy, 0 to 1."""
    runtime: str
    """Name of the real runtime."""
    verdicts: Mapping[Verdict, int]
    """Verdict -> number of real runs with that verdict."""
    by_energy: RankAgreement[RankedByEnergy] | None
    """Agreement of the rankings by energy; None if a run counted no energy."""


@dataclass(frozen=True, slots=True)
class AgreeResult:
    """Result of `agree`."""

    agreement: RankAgreement[RankedConfiguration]
    """Ranks by time, times in seconds, and Kendall's tau-b."""
    by_energy: RankAgreement[RankedConfiguration] | None
    """Ranks by energy, energies of all devices in joules, and Kendall's tau-b; None if a run counted no
    energy."""
    target: float
    """Test accuracy (share). Configurations are ranked by the time until they reach this accuracy."""
    runtime: str
    """Name of the runtime with a real clock."""
    real: tuple[Result, ...]
    """Runs made with `runtime`."""
    folder: Path
    """Folder with the run directories."""

    def output(self) -> Agreement:
        """For programs."""
        times = self.agreement.with_rows(RankedByTime)
        return Agreement(
            **{field.name: getattr(times, field.name) for field in fields(times)},
            target=self.target,
            runtime=self.runtime,
            verdicts=summary.verdicts(self.real),
            by_energy=None if self.by_energy is None else self.by_energy.with_rows(RankedByEnergy),
        )


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
    found = agreement.agreement(agreement.times(labels, virtual, real, target))
    joules = agreement.energies(labels, virtual, real, target)
    by_energy = None if joules is None else agreement.agreement(joules)
    used = studies[1].cells[0].plan.runtime
    return AgreeResult(found, by_energy, target, used, tuple(real), folder)


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
