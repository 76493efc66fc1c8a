"""Every run that lives on this machine, found by its labels: `ps` and `down`, from any directory.

Containers and networks carry their run's label, processes its name in their environment. So what a
crash left behind is found without the topology, the run directory or the controller.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from testbed import engine
from testbed.errors import BadInputError
from testbed.rundir import RunDirectory
from testbed.runtimes import process

_COMPLETE = ("after", "updates", "target_accuracy")
_GOODBYE = 8.0
"""Seconds that a controller has to end its run."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    run: str
    runtime: str
    parts: int
    """Containers or processes that run."""
    directory: Path | None
    """None where the run's things do not say."""


def find() -> list[LiveRun]:
    """All runs that have something running or left over here, by name."""
    runs = {live.run: live for live in [*_as_processes(), *_in_docker()]}
    return [runs[name] for name in sorted(runs)]


def resumable(runs: Path, name: str) -> RunDirectory:
    """The directory of the ended run `name` (its id in `runs`, or its path), made ready to go on.

    Raises BadInputError where there is none, or nothing to carry on.
    """
    path = next((p for p in (runs / name, Path(name)) if (p / "manifest.json").is_file()), None)
    if path is None:
        raise BadInputError(f"no run {name} in {runs}; `testbed runs` shows what there is")
    directory = RunDirectory(path.resolve())
    outcome = directory.read_manifest().get("outcome")
    if outcome in _COMPLETE:
        raise BadInputError(f"{directory.run} is complete (it ended by `{outcome}`); start a new run")
    if not directory.events.exists() or not list(directory.models.glob("*.safetensors")):
        raise BadInputError(f"{directory.run} never got as far as a first model; start a new run")
    if os.environ.get("TESTBED_RUN") != directory.run and directory.run in {r.run for r in find()}:
        raise BadInputError(f"{directory.run} still lives: `testbed down {directory.run}` ends it")
    directory.open()
    return directory


def take_down(live: LiveRun) -> int:
    """End `live`, by its controller if that still lives, and remove what is left; how many things."""
    directory = _existing(live.directory)
    if directory is not None:
        _ask_controller(directory)
    removed = process.remove(live.run)
    if engine.available():
        from testbed.runtimes import docker

        client = engine.connect()
        try:
            removed += docker.remove(client, live.run, directory)
        finally:
            client.close()
    if directory is not None:
        directory.remove_work()
    return removed


def _in_docker() -> list[LiveRun]:
    if not engine.available():
        return []
    from testbed.runtimes import docker

    client = engine.connect()
    try:
        found = docker.runs(client)
    finally:
        client.close()
    return [
        LiveRun(run, "docker", entry["running"], _path(entry["directory"]))
        for run, entry in found.items()
    ]


def _as_processes() -> list[LiveRun]:
    runs: dict[str, list[process.ProcessInfo]] = {}
    for info in process.find():
        runs.setdefault(info.run, []).append(info)
    return [
        LiveRun(run, "process", len(infos), _path(infos[0].directory)) for run, infos in runs.items()
    ]


def _ask_controller(directory: RunDirectory) -> None:
    """Let the controller, if it still lives, end its run in order."""
    try:
        told: dict[str, Any] = directory.read_manifest()["controller"]
        controller = psutil.Process(told["pid"])
        if controller.create_time() != told["started"]:
            return
        controller.terminate()
        deadline = time.monotonic() + _GOODBYE
        while controller.is_running() and time.monotonic() < deadline:
            if controller.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(0.05)
    except (KeyError, psutil.Error):
        return


def _existing(path: Path | None) -> RunDirectory | None:
    return RunDirectory(path) if path is not None and path.is_dir() else None


def _path(text: str | Path | None) -> Path | None:
    return Path(text) if text else None
