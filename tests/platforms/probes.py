"""Checks that take more than one command, run on the machine itself.

    python -m tests.platforms.probes limits|killed|left FOLDER

FOLDER holds the run directories of the checks. Prints what is wrong, or one line that says what was
found; exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from analysis import alike_devices
from testbed.host import docker_engine
from testbed.runtimes.docker.containers import COMPONENT_LABEL, RUN_LABEL
from testbed.runtimes.process import runtime
from tests.running import TESTBED, TOPOLOGIES

_NO_OTHER_PROCESSES = ("unshare", "--pid", "--fork", "--mount-proc")
"""Keeps `down --all` from ending runs of other engines on this host."""
_PATIENCE_SECONDS = 20.0
"""systemd removes units, and the kernel control groups, a moment after they were told to."""
_SYSTEMD = Path("/run/systemd/system")
"""Exists if systemd is the init of this machine."""


def main() -> int:
    """Run one probe; return its exit code."""
    parser = argparse.ArgumentParser(description="Check what takes more than one command.")
    parser.add_argument("probe", choices=PROBES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shared", action="store_true", help="the engine may have runs of others")
    options = parser.parse_args()
    probe: Callable[[Path, bool], Iterator[str]] = PROBES[options.probe]
    wrong = list(probe(options.folder, options.shared))
    print("\n".join(wrong) if wrong else f"{options.probe}: nothing wrong")
    return 1 if wrong else 0


def limits(folder: Path, shared: bool) -> Iterator[str]:
    """Compare the limits that the kernel has for each device of a run with what its topology asks."""
    run = _start(folder / "limits")
    try:
        manifest = json.loads((run / "manifest.json").read_text())
        with closing(docker_engine.connect()) as engine:
            found = engine.containers.list(filters={"label": f"{RUN_LABEL}={run.name}"})
            pids = {each.labels[COMPONENT_LABEL]: each.attrs["State"]["Pid"] for each in found}
        for name, device in alike_devices.expand(manifest["devices"]).items():
            asked = {
                "cpu": device["cpu"],
                "memory": device["memory"],
                "swap": 0,
                "cpuset": manifest["cpus"]["devices"],
            }
            given = _limits(pids[name])
            print(f"{name}: asked {asked}, the kernel has {given}")
            yield from _differences(name, asked, given)
    finally:
        _testbed("down", run.name)


def killed(folder: Path, shared: bool) -> Iterator[str]:
    """Kill the controller of a run with SIGKILL, then take the run down."""
    run = _start(folder / "killed")
    manifest = json.loads((run / "manifest.json").read_text())
    os.kill(manifest["controller"]["pid"], signal.SIGKILL)
    if not _containers_of(run.name):
        yield "no container outlived the controller, so this shows nothing"
    which = run.name if shared else "--all"
    down = [*_NO_OTHER_PROCESSES, *TESTBED, "down", which, "--runs", str(run.parent)]
    done = subprocess.run(down, check=False, stdout=sys.stdout, stderr=subprocess.STDOUT)
    if done.returncode:
        yield f"`testbed down {which}` failed with exit code {done.returncode}"
    yield from _until_gone([run.name])


def left(folder: Path, shared: bool) -> Iterator[str]:
    """Search for everything that the runs in `folder` left, also after systemd has reloaded its
    units."""
    runs = [run.parent.name for run in folder.glob("*/*/manifest.json")]
    if not runs:
        yield "there was no run"
    yield from _until_gone(runs)
    if _SYSTEMD.exists():
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        yield from (f"after daemon-reload: {each}" for each in _until_gone(runs))


PROBES = {"limits": limits, "killed": killed, "left": left}


def _start(runs: Path) -> Path:
    """Start the quickstart in the background; return its run directory once its devices work."""
    _testbed("up", TOPOLOGIES / "quickstart.yaml", "--runtime", "docker", "--detach", "--runs", runs)
    (run,) = runs.iterdir()
    return run


def _testbed(*arguments: str | Path) -> None:
    command = [*TESTBED, *map(str, arguments)]
    subprocess.run(command, check=True, stdout=sys.stdout, stderr=subprocess.STDOUT)


def _limits(pid: int) -> dict[str, Any]:
    """The limits of the control group of `pid`: share of a core, bytes, bytes, and cores."""
    groups = _groups(pid)
    if (unified := groups.get("")) is not None and (unified / "memory.max").exists():
        quota, of_period = (unified / "cpu.max").read_text().split()
        swap = (unified / "memory.swap.max").read_text().strip()
        return {
            "cpu": quota if quota == "max" else int(quota) / int(of_period),
            "memory": int((unified / "memory.max").read_text()),
            "swap": int(swap) if swap.isdigit() else swap,
            "cpuset": (unified / "cpuset.cpus").read_text().strip(),
        }
    cpu, memory = groups["cpu"], groups["memory"]
    bytes_of_memory = int((memory / "memory.limit_in_bytes").read_text())
    with_swap = int((memory / "memory.memsw.limit_in_bytes").read_text())
    period = int((cpu / "cpu.cfs_period_us").read_text())
    return {
        "cpu": int((cpu / "cpu.cfs_quota_us").read_text()) / period,
        "memory": bytes_of_memory,
        "swap": with_swap - bytes_of_memory,
        "cpuset": (groups["cpuset"] / "cpuset.cpus").read_text().strip(),
    }


def _groups(pid: int) -> dict[str, Path]:
    """Folders of the control groups of `pid`, by controller; that of cgroup v2 by the empty name."""
    roots: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            roots[""] = Path(where)
        elif kind == "cgroup":
            roots |= dict.fromkeys(options.split(","), Path(where))
    lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
    return {
        controller: roots[controller] / path.lstrip("/")
        for _, controllers, path in (line.split(":", 2) for line in lines)
        for controller in controllers.split(",")
        if controller in roots
    }


def _differences(device: str, asked: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    for what, value in asked.items():
        tolerance = 0.01 * value if what == "cpu" else 0
        exact = not isinstance(value, int | float) or not isinstance(given[what], int | float)
        if given[what] != value if exact else abs(given[what] - value) > tolerance:
            yield f"{device}: {what} is {given[what]}, asked was {value}"


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


def _containers_of(run: str) -> list[str]:
    return [each for each in _in_engine(run) if each.startswith("container")]


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
