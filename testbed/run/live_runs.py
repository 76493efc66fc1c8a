"""Live runs of this machine, found by their labels, for `ps` and `down`, and the logs of runs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from agents import events
from agents.events import COMPLETE
from agents.texts import make_printable, name_list
from analysis.client_story import story as story_of
from testbed.errors import BadInputError, HostError
from testbed.run import preparing
from testbed.rundir import finding
from testbed.rundir.directory import RunDirectory, find_run, last_log_lines
from testbed.runtimes import LiveRun, emulator
from testbed.traits import RUNTIMES, emulated_runtime_names, is_simulated

# Live runs of this machine, found by their labels, for `ps` and `down`. Everything that a run starts is
# labelled with the run's id. Each runtime finds processes or containers by that label
# (`testbed.runtimes.Emulator`). The remains of a crashed run are therefore found without the topology,
# the run directory or the controller.

_STOP_TIMEOUT_SECONDS, _STOP_SECONDS_PER_DEVICE, _LONGEST_STOP_SECONDS = 60.0, 1.0, 600.0


def find_live_runs() -> list[LiveRun]:
    """Runs with running or left-over processes or containers on this machine, sorted by id."""
    runs: dict[str, LiveRun] = {}
    for live in (live for name in emulated_runtime_names() for live in emulator(name).live_runs()):
        if live.run not in runs or runs[live.run].runtime is None:
            runs[live.run] = live
    return [runs[name] for name in sorted(runs)]


def find_all_runs(runs: Path) -> list[LiveRun]:
    """Runs of `find_live_runs`, and those in the folder `runs` that have only a `work/` folder left. If
    a run has only a controller left, its runtime is read from the manifest."""
    found = {live.run: live for live in (*leftovers(None, runs), *find_live_runs())}
    return [_with_runtime(found[name]) for name in sorted(found)]


def _with_runtime(live: LiveRun) -> LiveRun:
    return live if live.runtime is not None else replace(live, runtime=_runtime(_own_directory(live)))


def _runtime(directory: RunDirectory | None) -> str | None:
    """None if the manifest has no runtime yet or is damaged."""
    with suppress(BadInputError):
        return None if directory is None else directory.read_manifest().get("runtime")
    return None


def leftovers(run: str | None, runs: Path) -> list[LiveRun]:
    """Look at the runs in `runs`, and at `run` (an id or a path). They have left something if their
    `work/` still exists, or if processes and files may be left on real devices.

    A run has only the folder `work/` left if its controller was killed before it had started anything.
    The same holds if the controller had started only local processes, because local processes end with
    the controller.
    """
    paths = [*finding.runs_in(runs).values()]
    if run is not None and (named := finding.find_exact(run, runs)) is not None:
        paths.append(named)
    found = map(RunDirectory, dict.fromkeys(path.resolve() for path in paths))
    return [
        LiveRun(one.run, None, 0, one.path)
        for one in found
        if (one.hosts.exists() or (one.work.is_dir() and not one.work.is_symlink()))
        and _is_of_this_host(one)
    ]


def _is_of_this_host(directory: RunDirectory) -> bool:
    """True if the host is unknown. Several hosts may share a folder of runs."""
    with suppress(BadInputError):
        host: str | None = directory.read_manifest().get("host", {}).get("name")
        return host in (None, platform.node())
    return True


def locate(run: str, runs: Path, *, live: bool = False) -> RunDirectory:
    """Search in `runs`, then among the live runs of this machine.

    `run`: an id, a path, or the beginning of either. Raises BadInputError if there is no such run, or
    more than one.
    """
    found = find_run(run, runs, live=live)
    if found is None:
        everywhere = {one.run: one.directory for one in find_live_runs()}
        path = everywhere.get(finding.complete_id(run, everywhere) or "")
        found = None if path is None else RunDirectory(path)
    if found is None:
        like = finding.similar_id(Path(run).name, [*finding.runs_in(runs), *everywhere])
        asked = f" (did you mean {like}?)" if like else ""
        raise BadInputError(f"no run {run}{asked}: `testbed ps` and `testbed runs` list the runs")
    return found


def prepare_resume(runs: Path, run: str) -> RunDirectory:
    """`run`: an id in `runs`, a path, or the beginning of either. Raises BadInputError if there is no
    such run, or the run cannot be resumed."""
    from agents.aggregator import storage  # imports all rules

    directory = find_run(run, runs)
    for path in (runs / run, Path(run)) if directory is None else (directory.path,):
        _check_access(path)
    if directory is None:
        raise BadInputError(f"no run {run} in {runs}; `testbed runs` lists the runs")
    outcome = _recorded_end(directory) or directory.read_manifest().get("outcome")
    if outcome in COMPLETE:
        raise BadInputError(f"{directory.run} is complete (it ended by `{outcome}`); start a new run")
    if directory.controller() or directory.run in {live.run for live in find_live_runs()}:
        raise BadInputError(f"{directory.run} is still running: `testbed down {directory.run}` ends it")
    runtime = _runtime(directory)
    if runtime in RUNTIMES and (why := RUNTIMES[runtime].unresumable_reason):
        raise BadInputError(
            f"{directory.run} is a run of the {runtime} runtime, which cannot be resumed: {why}, "
            f"testbed up {directory.topology}"
        )
    if not directory.checkpoint.is_file():
        raise BadInputError(
            f"{directory.run} has no saved state to resume from: it ended before its first model, or "
            "has `durability: none`; start a new run"
        )
    try:
        storage.check_snapshot(directory.checkpoint)
    except (OSError, storage.SnapshotError) as error:
        raise BadInputError(f"{directory.run} cannot be resumed: {error}") from error
    preparing.check_unchanged(directory)
    directory.open()
    return directory


def _check_access(run: Path) -> None:
    """Raises BadInputError if this user may not resume the run."""
    for folder in (run, run / "state"):
        allowed = os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)
        if os.path.isdir(folder) and not allowed:  # noqa: PTH112  (Path's raises PermissionError)
            raise BadInputError(
                f"you may not read and write {folder}: resume the run as the user who started it"
            )


def _recorded_end(directory: RunDirectory) -> str | None:
    """Look for the end in the records: after a crash, the manifest may lack the reason."""
    if not directory.events.is_file():
        return None
    try:
        ends = [one for one in events.read(directory.events) if isinstance(one, events.RunEnded)]
    except ValueError as error:
        raise BadInputError(str(error)) from error
    return next((one.reason for one in ends if one.reason in COMPLETE), None)


def take_down(live: LiveRun) -> None:
    """Let the controller end the run if it is alive. Then remove everything that is left.

    Raises HostError if something may be left.
    """
    # Imported here because it imports the broker, which virtual time does not use.
    from testbed.runtimes.process import runtime as process
    from testbed.runtimes.ssh import removal

    directory = _own_directory(live)
    if directory is not None:
        _ask_controller(directory)
    process.remove(live.run)  # the controller first, before it starts more
    runtime = _runtime(directory)
    try:
        for name in emulated_runtime_names():
            if not emulator(name).take_down(live.run, directory) and name == runtime:
                raise HostError(
                    f"{live.run}: {RUNTIMES[name].lack}, so that its processes or containers could not "
                    f"be removed. See `testbed doctor` for the fix, then run `testbed down {live.run}`."
                )
        if directory is not None:
            removal.remove(directory)
    finally:
        if directory is not None:
            directory.remove_work()
    if directory is not None and directory.work.is_dir():
        raise HostError(f"{directory.work} could not be removed: remove it, because it holds passwords")


def _ask_controller(directory: RunDirectory) -> None:
    """Wait for at most `stop_timeout`. If the controller is not alive, do nothing."""
    from testbed.runtimes.process import runtime

    with suppress(psutil.Error, BadInputError):
        if (controller := directory.controller()) is None:
            return
        controller.terminate()
        controller.resume()  # in case somebody has suspended it
        runtime.still_alive([controller], stop_timeout(directory))


def stop_timeout(directory: RunDirectory) -> float:
    """Seconds that a controller may take to end its run: the engine needs time to remove many
    containers, and a run is worth little without verdict and logs."""
    devices = 0
    with suppress(BadInputError):  # it is damaged
        devices = len(directory.read_manifest().get("devices", {}))
    return min(_STOP_TIMEOUT_SECONDS + _STOP_SECONDS_PER_DEVICE * devices, _LONGEST_STOP_SECONDS)


def _own_directory(live: LiveRun) -> RunDirectory | None:
    """None if the run has no directory, or if its label names the directory of another run."""
    if live.directory is None or live.directory.name != live.run:
        return None
    found = finding.find_exact(str(live.directory), Path())
    return None if found is None else RunDirectory(found.resolve())


_MAX_LINE = 10_000
"""A limit is needed, because a device may have written the line."""


def read_logs(directory: RunDirectory, component: str | None, tail: int) -> Iterator[tuple[str, str]]:
    """Yield name and lines of each component.

    `component`: the only component or device group to read. Raises BadInputError if the run has no such
    component.
    """
    name = directory.run
    live = next((found for found in find_live_runs() if found.run == name), None)
    texts = {path.stem: last_log_lines(path, tail) for path in directory.logs.glob("*.log")}
    if live is not None and live.runtime is not None:
        texts |= emulator(live.runtime).logs(name, tail)
    if not texts and is_simulated(directory.read_manifest().get("runtime")):
        raise BadInputError(
            f"{name} has no logs: in virtual time no process writes any. See `testbed watch {name}` and "
            f"`testbed logs {name} DEVICE --story`"
        )
    wanted = sorted(texts)
    if component is not None and component in texts:
        wanted = [component]
    elif component is not None:
        devices = directory.read_manifest().get("devices", {})
        wanted = [
            each for each, facts in devices.items() if facts["group"] == component and each in texts
        ]
    if component is not None and not wanted:
        raise BadInputError(f"{name} has no log of {component}; it has {name_list(sorted(texts))}")
    for each in wanted:
        lines = (make_printable(line, _MAX_LINE, keep="\t") for line in texts[each])
        yield each, "\n".join(lines)


def read_story(directory: RunDirectory, device: str) -> str:
    """One line per event in the records so far. Raises BadInputError if the run has no such device."""
    devices = directory.read_manifest().get("devices", {})
    if device not in devices:
        raise BadInputError(
            f"{directory.run} has no device {device}; it has {name_list(sorted(devices))}"
        )
    if not directory.events.is_file():
        return ""
    moments = story_of(events.read(directory.events), device)
    return "\n".join(make_printable(str(moment), _MAX_LINE) for moment in moments)
