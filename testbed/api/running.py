"""Runs from Python: one run, also in virtual time, and what there is of runs."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed import user_code
from testbed.api import launching
from testbed.api.handle import OnEvent, RunHandle
from testbed.api.launching import Launch, plan_run
from testbed.api.results import read_run
from testbed.api.topology_input import TopologyLike, text_of
from testbed.dashboard import serving
from testbed.errors import BadInputError, HostError, TestbedError, from_os_error
from testbed.run import live_runs
from testbed.rundir import finding
from testbed.runtimes import LiveRun
from testbed.view import View

if TYPE_CHECKING:
    from analysis.load import Run as Result
    from testbed.run.optimum import OptimumComparison
    from testbed.rundir.listing import RunRow


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
    user_code.remove_leftovers()
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
