"""Live runs of this machine, found by their labels: `ps` and `down`, from any directory.

All that a run starts carries its name, by which each runtime finds it (`testbed.runtimes.Emulator`). So
what a crash left behind is found without the topology, the run directory or the controller.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from testbed.errors import BadInputError, HostError
from testbed.rundir.directory import RunDirectory
from testbed.runtimes import LiveRun, emulator, process
from testbed.traits import RUNTIMES, emulated

COMPLETE = ("after", "updates", "target_accuracy")
"""Outcomes of runs that ended as planned."""
_STOP_TIMEOUT_SECONDS = 8.0
"""What a controller has to end its run."""


def find() -> list[LiveRun]:
    """All runs that have something running or left over on this machine, by name."""
    runs: dict[str, LiveRun] = {}
    for live in (live for name in emulated() for live in emulator(name).live_runs()):
        if live.run not in runs or runs[live.run].runtime is None:
            runs[live.run] = live
    return [runs[name] for name in sorted(runs)]


def directory_of(run: str, runs: Path) -> RunDirectory | None:
    """The directory of `run`, which is a run id in `runs` or a path."""
    for path in (runs / run, Path(run)):
        if (path / "manifest.json").is_file():
            return RunDirectory(path.resolve())
    return None


def located(run: str, runs: Path) -> RunDirectory:
    """The directory of `run`: an id in `runs`, a path, or the id of one that lives anywhere on this
    machine. Raises BadInputError where there is none."""
    found = directory_of(run, runs)
    if found is None:
        path = next((live.directory for live in find() if live.run == run), None)
        found = None if path is None else RunDirectory(path)
    if found is None:
        raise BadInputError(f"no run {run}: `testbed ps` and `testbed runs` show what there is")
    return found


def resumable(runs: Path, run: str) -> RunDirectory:
    """The directory of the ended `run` (its id in `runs`, or its path), made ready to go on.

    Raises BadInputError where there is none, or nothing to carry on.
    """
    directory = directory_of(run, runs)
    if directory is None:
        raise BadInputError(f"no run {run} in {runs}; `testbed runs` shows what there is")
    outcome = directory.read_manifest().get("outcome")
    if outcome in COMPLETE:
        raise BadInputError(f"{directory.run} is complete (it ended by `{outcome}`); start a new run")
    if directory.controller() or directory.run in {live.run for live in find()}:
        raise BadInputError(f"{directory.run} still lives: `testbed down {directory.run}` ends it")
    if not directory.events.exists() or not list(directory.models.glob("*.safetensors")):
        raise BadInputError(f"{directory.run} never got as far as a first model; start a new run")
    directory.open()
    return directory


def take_down(live: LiveRun) -> None:
    """End `live`, by its controller if that still lives, and remove what is left of it.

    Raises HostError where something may be left.
    """
    directory = _existing(live)
    if directory is not None:
        _ask_controller(directory)
    process.remove(live.run)  # the controller, before it starts more
    runtime = None if directory is None else directory.read_manifest().get("runtime")
    for name in emulated():
        if not emulator(name).take_down(live.run, directory) and name == runtime:
            raise HostError(
                f"{live.run}: {RUNTIMES[name].lack}, so what it has started could not be removed. "
                f"`testbed doctor` tells the fix; after it, `testbed down {live.run}`."
            )
    if directory is not None:
        directory.remove_work()


def _ask_controller(directory: RunDirectory) -> None:
    """Let the controller, if it still lives, end its run in order."""
    controller = directory.controller()
    if controller is None:
        return
    with suppress(psutil.Error):
        controller.terminate()
        process.still_alive([controller], _STOP_TIMEOUT_SECONDS)


def _existing(live: LiveRun) -> RunDirectory | None:
    """Its directory, if there is one and it is the run's own: a label may be wrong."""
    if live.directory is None or live.directory.name != live.run:
        return None
    return directory_of(str(live.directory), Path())
