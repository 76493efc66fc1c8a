"""Every run that lives on this machine, found by its labels: `ps` and `down`, from any directory.

Containers and networks carry their run's label, processes its name in their environment. So what a
crash left behind is found without the topology, the run directory or the controller.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from testbed import engine
from testbed.errors import BadInputError, HostError
from testbed.rundir import RunDirectory
from testbed.runtimes import process

COMPLETE = ("after", "updates", "target_accuracy")
_GOODBYE = 8.0
"""Seconds that a controller has to end its run."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    run: str
    runtime: str | None
    """None while nothing but its controller lives."""
    parts: int
    """Containers or processes that run, the controller aside."""
    directory: Path | None
    """None where the run's things do not say."""


def find() -> list[LiveRun]:
    """All runs that have something running or left over here, by name."""
    runs = {live.run: live for live in [*_as_processes(), *_in_docker()]}
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
    process.remove(live.run)
    with engine.if_present() as client:
        if client is not None:
            from testbed.runtimes import docker

            docker.remove(client, live.run, directory)
        elif directory is not None and directory.read_manifest().get("runtime") == "docker":
            raise HostError(
                f"{live.run}: no Docker engine answers, so its containers could not be removed. "
                f"Start the engine (`testbed doctor` tells how), then `testbed down {live.run}`."
            )
    if directory is not None:
        directory.remove_work()


def container_logs(run: str, tail: int) -> dict[str, str]:
    """The last `tail` lines of each container of `run`, by its part; none where no engine answers."""
    with engine.if_present() as client:
        if client is None:
            return {}
        from testbed.runtimes import docker

        return docker.logs(client, run, tail)


def _in_docker() -> list[LiveRun]:
    with engine.if_present() as client:
        if client is None:
            return []
        from testbed.runtimes import docker

        return [
            LiveRun(run, "docker", found["running"], _path(found["directory"]))
            for run, found in docker.runs(client).items()
        ]


def _as_processes() -> list[LiveRun]:
    runs: dict[str, list[process.ProcessInfo]] = {}
    for info in process.find():
        runs.setdefault(info.run, []).append(info)
    found = []
    for run, infos in runs.items():
        parts = sum(info.part != "controller" for info in infos)
        found.append(LiveRun(run, "process" if parts else None, parts, _path(str(infos[0].directory))))
    return found


def _ask_controller(directory: RunDirectory) -> None:
    """Let the controller, if it still lives, end its run in order."""
    controller = directory.controller()
    if controller is None:
        return
    with suppress(psutil.Error):
        controller.terminate()
        process.still_alive([controller], _GOODBYE)


def _existing(live: LiveRun) -> RunDirectory | None:
    """Its directory, if that is there and is its own: what a label says is not believed blindly."""
    if live.directory is None or live.directory.name != live.run:
        return None
    return directory_of(str(live.directory), Path())


def _path(text: str | None) -> Path | None:
    return Path(text) if text and Path(text).is_absolute() else None
