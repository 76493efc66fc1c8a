"""Start a run, find one that goes on, read what one has left."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from testbed import topology as topologies
from testbed import tracking
from testbed.api import background
from testbed.api.given import TopologyLike, text_of
from testbed.api.handle import OnEvent, RunHandle
from testbed.errors import reading
from testbed.run import live_runs
from testbed.run import up as upping
from testbed.rundir.directory import RunDirectory, new_run_id

if TYPE_CHECKING:
    from analysis.load import Run as Result


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
    given = text_of(topology)
    if track:
        tracking.check(track)
    options = upping.Options(runtime, oversubscribe, data_root(data), track=tuple(track))
    parsed, _ = upping.planned_here(topologies.parse(given.text, given.name), options)
    directory = RunDirectory.create(Path(runs), new_run_id(parsed.name))
    controller = background.start(
        directory,
        given.name,
        options,
        (lambda _: None) if on_progress is None else on_progress,
        text=given.text,
        tied=not detach,
    )
    return RunHandle(directory, None if detach else controller, on_event)


def attach(run: str | Path, *, on_event: OnEvent | None = None, runs: str | Path = "runs") -> RunHandle:
    """A run that was started elsewhere, or is over: its id, or its directory. It goes on when this
    process ends. An id's beginning will do where it begins no other, or no other that goes on. Raises
    BadInputError where there is none."""
    return RunHandle(live_runs.located(str(run), Path(runs), live=True), None, on_event)


def load(run: str | Path | RunHandle, *, runs: str | Path = "runs") -> Result:
    """What a run has left or, while it goes on, has recorded so far, as tables (docs/analysis.md): of
    its id, its directory or its handle. Raises BadInputError where there is none, or it is damaged."""
    if isinstance(run, RunHandle):
        return run.result
    return read(live_runs.located(str(run), Path(runs)).path)


def read(path: Path) -> Result:
    """The tables of the run directory `path`. Raises BadInputError where it cannot be read."""
    from analysis import load

    with reading(path):
        return load.load(path)


def data_root(data: str | Path | None) -> Path | None:
    """The folder of datasets: `data`, else TESTBED_DATA; None: there is none."""
    root = data or os.environ.get("TESTBED_DATA")
    return Path(root) if root else None
