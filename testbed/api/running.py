"""Start a run, find one that goes on, read what one has left."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.api import background
from testbed.api.handle import OnEvent, RunHandle
from testbed.api.launching import Launch, planned
from testbed.api.topology_input import TopologyLike
from testbed.dashboard import serving
from testbed.errors import BadInputError, HostError, TestbedError, of_os, reading
from testbed.run import live_runs
from testbed.rundir import finding
from testbed.runtimes import LiveRun

if TYPE_CHECKING:
    from analysis.load import Run as Result
    from testbed.run.optimum import Ending


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
) -> RunHandle:
    """Launch `topology` and return as soon as its run clock goes, as `testbed up -d` does.

    `topology`: a file's path, a mapping of what is in one (or its text), or a `Topology`.
    `runtime`: `docker`, `swarm`, `process`, `virtual` or `auto`; None: as the topology says.
    `on_event`: called with each record (`testbed.events`), in order, in a thread of its own; what it
    raises ends the calls, and `wait` raises it. `on_progress`: called with lines on the launch.
    `data`: the folder of datasets as parquet files; None: TESTBED_DATA, else the hub.
    `track`: trackers that are told of the run, of `mlflow`, `wandb`, `tensorboard`.
    `runs`: the folder to make the run directory in.

    The run is a process of its own, which is taken down by `down`, at the end of a `with` block, and at
    the end of this process, however that ends; but not if `detach`. Raises BadInputError, HostError,
    RunFailedError.
    """
    launch = planned(
        topology, runtime=runtime, data=data, oversubscribe=oversubscribe, track=track, runs=runs
    )
    return start(launch, on_event=on_event, on_progress=on_progress, detach=detach)


def start(
    launch: Launch,
    *,
    on_event: OnEvent | None = None,
    on_progress: Callable[[str], object] | None = None,
    detach: bool = False,
) -> RunHandle:
    """`up` of what `planned` has made."""
    directory = launch.directory()
    report = (lambda _: None) if on_progress is None else on_progress
    for hint in launch.hints:
        report(hint)
    with launch.begun_in(directory):
        controller = background.start(launch, directory, report, tied=not detach)
    return RunHandle(directory, None if detach else controller, on_event)


def attach(run: str | Path, *, on_event: OnEvent | None = None, runs: str | Path = "runs") -> RunHandle:
    """A run that was started elsewhere, or is over: its id, or its directory. It goes on when this
    process ends. An id's beginning will do where it begins no other, or no other that goes on. Raises
    BadInputError where there is none."""
    return RunHandle(live_runs.located(str(run), Path(runs), live=True), None, on_event)


def load(run: str | Path | RunHandle, *, runs: str | Path = "runs") -> Result:
    """The tables of a run (docs/guide/analysis.md), given by its id, its directory or its handle; of a
    live run what has been recorded so far. Raises BadInputError if there is none, or it is damaged."""
    if isinstance(run, RunHandle):
        return run.result
    return read(live_runs.located(str(run), Path(runs)).path)


def read(path: Path) -> Result:
    """The tables of the run directory `path`. Raises BadInputError where it cannot be read."""
    from analysis import load

    with reading(path):
        return load.load(path)


def ps(runs: str | Path = "runs") -> list[LiveRun]:
    """The runs that have something running or left over on this machine, by name. Those that have
    nothing beside a controller in the foreground, as in virtual time, are found in the folder `runs`."""
    return live_runs.find_all(Path(runs))


def down(run: str | Path | None, *, runs: str | Path = "runs") -> list[LiveRun]:
    """End `run` (its id, the beginning of that, or its directory; None: all on this machine), and remove
    their containers, networks and processes; which these were. Raises BadInputError, and HostError on
    all that something may be left of, when the others are down."""
    given = None if run is None else str(run)
    found = {left.run: left for left in live_runs.leftovers(given, Path(runs))}
    found |= {live.run: live for live in live_runs.find()}
    named = None if given is None else finding.whole_id(Path(given).name, found)
    ended = [one for one in found.values() if given is None or one.run == named]
    failures = []
    for each in ended:
        try:
            live_runs.take_down(each)
        except (TestbedError, OSError) as error:
            failures.append(str(of_os(error) if isinstance(error, OSError) else error))
    if failures:
        raise HostError("\n".join(failures))
    return ended


def list_runs(
    runs: str | Path = "runs", *, sort: str = "started", matching: str = ""
) -> list[dict[str, Any]]:
    """A row for each run directory in the folder `runs`: what came of it. By the column `sort`; only
    those with the words `matching` in their row. Raises BadInputError."""
    from testbed.rundir.listing import SORTS, arranged, listing

    if sort not in SORTS:
        raise BadInputError(f"--sort {sort}: expected one of {', '.join(SORTS)}")
    return arranged(listing(Path(runs)), sort, matching)


def told(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `list_runs` in words for people."""
    from testbed.rundir import listing

    return listing.told(row)


def list_folders(runs: str | Path = "runs") -> list[Path]:
    """The folders of runs in `runs`, such as those of sweeps, whose runs `list_runs` does not list."""
    return finding.folders_of_runs(Path(runs))


@contextmanager
def page(
    shown: Iterable[str | Path] = (),
    *,
    port: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
    runs: str | Path = "runs",
) -> Iterator[subprocess.Popen[bytes]]:
    """Inside, the page that shows these runs in the browser, or lists all in the folder `runs`, or in
    the one that is named alone, such as a sweep's, is served on `port` (0: a free one) by a process of
    its own; `on_progress` is told where. Raises BadInputError."""
    names = [str(run) for run in shown]
    if len(names) == 1 and (folder := finding.folder_of_runs(names[0], Path(runs))) is not None:
        names, runs = [], folder
    named = [live_runs.located(name, Path(runs)) for name in names]
    if not named and not Path(runs).is_dir():
        raise BadInputError(f"there is no folder {runs}: name one with --runs, or name a run")
    with serving.served_page(named, port, on_progress, runs=Path(runs)) as process:
        yield process


def optimum(run: Result) -> Ending | None:
    """How near a run of a task whose optimum is known has come to it; None for others."""
    from testbed.run.optimum import ending

    return ending(run)
