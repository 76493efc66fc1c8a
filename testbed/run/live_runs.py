"""Live runs of this machine, found by their labels: `ps` and `down`, from any directory.

All that a run starts carries its name, by which each runtime finds it (`testbed.runtimes.Emulator`). So
what a crash left behind is found without the topology, the run directory or the controller.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from agents import events
from agents.events import COMPLETE
from testbed.errors import BadInputError, HostError
from testbed.run import unchanged
from testbed.rundir import finding
from testbed.rundir.directory import RunDirectory
from testbed.runtimes import LiveRun, emulator
from testbed.traits import RUNTIMES, emulated_runtime_names

_STOP_TIMEOUT_SECONDS, _STOP_SECONDS_PER_DEVICE, _LONGEST_STOP_SECONDS = 60.0, 1.0, 600.0


def find() -> list[LiveRun]:
    """All runs that have something running or left over on this machine, by name."""
    runs: dict[str, LiveRun] = {}
    for live in (live for name in emulated_runtime_names() for live in emulator(name).live_runs()):
        if live.run not in runs or runs[live.run].runtime is None:
            runs[live.run] = live
    return [runs[name] for name in sorted(runs)]


def find_all(runs: Path) -> list[LiveRun]:
    """As `find`, with those in the folder `runs` that no label tells of. Of those that have nothing but
    a controller, the runtime is as their manifest says."""
    found = {live.run: live for live in (*leftovers(None, runs), *find())}
    return [_with_runtime(found[name]) for name in sorted(found)]


def _with_runtime(live: LiveRun) -> LiveRun:
    return live if live.runtime is not None else replace(live, runtime=_runtime(_existing(live)))


def _runtime(directory: RunDirectory | None) -> str | None:
    """As the manifest says; None where it does not yet, or is damaged."""
    with suppress(BadInputError):
        return None if directory is None else directory.read_manifest().get("runtime")
    return None


def leftovers(run: str | None, runs: Path) -> list[LiveRun]:
    """Runs of this host whose `work/` is still there: those in `runs`, and `run` (an id, or a path). Of
    a killed controller that started only processes nothing else is left; or it has started none yet."""
    paths = [*finding.runs_in(runs).values()]
    if run is not None and (named := finding.exactly(run, runs)) is not None:
        paths.append(named)
    found = map(RunDirectory, dict.fromkeys(path.resolve() for path in paths))
    return [
        LiveRun(one.run, None, 0, one.path)
        for one in found
        if one.work.is_dir() and not one.work.is_symlink() and _of_this_host(one)
    ]


def _of_this_host(directory: RunDirectory) -> bool:
    """Whether a run was started here, as far as is known: a folder may be shared by several hosts."""
    with suppress(BadInputError):
        host: str | None = directory.read_manifest().get("host", {}).get("name")
        return host in (None, platform.node())
    return True


def directory_of(run: str, runs: Path, *, live: bool = False) -> RunDirectory | None:
    """The directory of `run` (see `finding.found`); with `live` one that goes on, where `run` is the
    beginning of others too. Raises BadInputError."""
    path = finding.found(run, runs, lambda one: live and RunDirectory(one).controller() is not None)
    return None if path is None else RunDirectory(path.resolve())


def located(run: str, runs: Path, *, live: bool = False) -> RunDirectory:
    """The directory of `run`: as `directory_of`, else the id, or its beginning, of a run that lives
    anywhere on this machine. Raises BadInputError where there is none, or it begins several."""
    found = directory_of(run, runs, live=live)
    if found is None:
        everywhere = {one.run: one.directory for one in find()}
        path = everywhere.get(finding.whole_id(run, everywhere) or "")
        found = None if path is None else RunDirectory(path)
    if found is None:
        raise BadInputError(f"no run {run}: `testbed ps` and `testbed runs` show what there is")
    return found


def resumable(runs: Path, run: str) -> RunDirectory:
    """The directory of the ended `run` (see `directory_of`), made ready to go on.

    Raises BadInputError where there is none, or nothing to carry on.
    """
    from agents.aggregator import snapshot  # with all rules

    directory = directory_of(run, runs)
    for path in (runs / run, Path(run)) if directory is None else (directory.path,):
        _check_access(path)
    if directory is None:
        raise BadInputError(f"no run {run} in {runs}; `testbed runs` shows what there is")
    outcome = _recorded_end(directory) or directory.read_manifest().get("outcome")
    if outcome in COMPLETE:
        raise BadInputError(f"{directory.run} is complete (it ended by `{outcome}`); start a new run")
    if directory.controller() or directory.run in {live.run for live in find()}:
        raise BadInputError(f"{directory.run} still lives: `testbed down {directory.run}` ends it")
    runtime = _runtime(directory)
    if runtime in RUNTIMES and (why := RUNTIMES[runtime].unresumable_reason):
        raise BadInputError(
            f"{directory.run} is of the {runtime} runtime, which resumes none: {why}, testbed up "
            f"{directory.topology}"
        )
    if not directory.checkpoint.is_file():
        raise BadInputError(
            f"{directory.run} has no state to go on from: it never got as far as a first model, or has "
            "`durability: none`; start a new run"
        )
    try:
        snapshot.check(directory.checkpoint)
    except (OSError, snapshot.SnapshotError) as error:
        raise BadInputError(f"{directory.run} cannot be continued: {error}") from error
    unchanged.check(directory)
    directory.open()
    return directory


def _check_access(run: Path) -> None:
    """Raise BadInputError where this user may not go on with the run in the folder `run`."""
    for folder in (run, run / "state"):
        allowed = os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)
        if os.path.isdir(folder) and not allowed:  # noqa: PTH112  (Path's raises PermissionError)
            raise BadInputError(
                f"you may not read and write {folder}: a run goes on as the user who has started it"
            )


def _recorded_end(directory: RunDirectory) -> str | None:
    """Why a run has ended as planned by its records, which a crash may have kept out of its manifest."""
    if not directory.events.is_file():
        return None
    try:
        ends = [one for one in events.read(directory.events) if isinstance(one, events.RunEnded)]
    except ValueError as error:
        raise BadInputError(str(error)) from error
    return next((one.reason for one in ends if one.reason in COMPLETE), None)


def take_down(live: LiveRun) -> None:
    """End `live`, by its controller if that still lives, and remove what is left of it.

    Raises HostError where something may be left.
    """
    # Here, as it brings the broker, which virtual time has no use for.
    from testbed.runtimes.process import runtime as process

    directory = _existing(live)
    if directory is not None:
        _ask_controller(directory)
    process.remove(live.run)  # the controller, before it starts more
    runtime = _runtime(directory)
    try:
        for name in emulated_runtime_names():
            if not emulator(name).take_down(live.run, directory) and name == runtime:
                raise HostError(
                    f"{live.run}: {RUNTIMES[name].lack}, so what it has started could not be removed. "
                    f"`testbed doctor` tells the fix; after it, `testbed down {live.run}`."
                )
    finally:
        if directory is not None:
            directory.remove_work()
    if directory is not None and directory.work.is_dir():
        raise HostError(f"{directory.work} could not be removed: remove it yourself, it has passwords")


def _ask_controller(directory: RunDirectory) -> None:
    """Let the controller, if it still lives, end its run in order."""
    from testbed.runtimes.process import runtime

    with suppress(psutil.Error, BadInputError):
        if (controller := directory.controller()) is None:
            return
        controller.terminate()
        controller.resume()  # where somebody has suspended it
        runtime.still_alive([controller], stop_timeout(directory))


def stop_timeout(directory: RunDirectory) -> float:
    """Seconds that a controller has to end its run: a fleet of containers takes the engine a while to
    remove, and without its verdict and its logs a run is worth little."""
    devices = 0
    with suppress(BadInputError):  # it is damaged
        devices = len(directory.read_manifest().get("devices", {}))
    return min(_STOP_TIMEOUT_SECONDS + _STOP_SECONDS_PER_DEVICE * devices, _LONGEST_STOP_SECONDS)


def _existing(live: LiveRun) -> RunDirectory | None:
    """Its directory, if there is one and it is the run's own: a label may be wrong."""
    if live.directory is None or live.directory.name != live.run:
        return None
    found = finding.exactly(str(live.directory), Path())
    return None if found is None else RunDirectory(found.resolve())
