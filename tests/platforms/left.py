"""What the runs in a folder have left on the machine where this is run.

    python -m tests.platforms.left FOLDER

FOLDER holds the run directories of the checks. Prints what is left, or that nothing is; exits with 1 if
anything is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from testbed.host import docker_engine
from testbed.runtimes.docker.specifications import RUN_LABEL
from testbed.runtimes.process import runtime

_PATIENCE_SECONDS = 20.0
"""systemd removes units, and the kernel control groups, a moment after they were told to."""
_SYSTEMD = Path("/run/systemd/system")
"""Exists if systemd is the init of this machine."""


def main() -> int:
    """Print what is left of the runs in the folder that is the first argument; 1 if anything is."""
    wrong = list(left(Path(sys.argv[1])))
    print("\n".join(wrong) if wrong else "left: nothing wrong")
    return 1 if wrong else 0


def left(folder: Path) -> Iterator[str]:
    """Search for everything that the runs in `folder` left, also after systemd has reloaded its
    units."""
    runs = [run.parent.name for run in folder.glob("*/*/manifest.json")]
    if not runs:
        yield "there was no run"
    yield from _until_gone(runs)
    if _SYSTEMD.exists():
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        yield from (f"after daemon-reload: {each}" for each in _until_gone(runs))


def _until_gone(runs: list[str]) -> list[str]:
    """Return what is left of `runs` after at most _PATIENCE_SECONDS."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (found := [each for run in runs for each in _of_run(run)]) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def _of_run(run: str) -> list[str]:
    """All that this machine has of `run`: in the engine, as processes, control groups and units."""
    found = [f"process {each.process.pid}" for each in runtime.find() if each.run == run]
    return [*_in_engine(run), *found, *_control_groups(run), *_units(run)]


def _in_engine(run: str) -> list[str]:
    filters = {"label": f"{RUN_LABEL}={run}"}
    with closing(docker_engine.connect()) as engine:
        api = engine.api
        return [
            *(f"container {each['Names'][0]}" for each in api.containers(all=True, filters=filters)),
            *(f"network {each['Name']}" for each in api.networks(filters=filters)),
            *(f"volume {each['Name']}" for each in api.volumes(filters=filters)["Volumes"] or ()),
        ]


def _control_groups(run: str) -> list[str]:
    """Control groups, anywhere, with the name of the run, also as systemd has it, without dashes."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    roots = {line.split()[1] for line in mounts if line.split()[2] in ("cgroup", "cgroup2")}
    return sorted(
        f"control group {folder}/{name}"
        for root in roots
        for folder, names, _ in os.walk(root)
        for name in names
        if _is_of(name, run)
    )


def _units(run: str) -> list[str]:
    """systemd's units of the run, whatever state they are in."""
    if not _SYSTEMD.exists() or shutil.which("systemctl") is None:
        return []
    command = ["systemctl", "list-units", "testbed*", "--all", "--plain", "--no-legend"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    units = [line.split()[0] for line in listed.splitlines() if line.strip()]
    return [f"unit {unit}" for unit in units if _is_of(unit, run)]


def _is_of(name: str, run: str) -> bool:
    return run in name or run.replace("-", "_") in name


if __name__ == "__main__":
    sys.exit(main())
