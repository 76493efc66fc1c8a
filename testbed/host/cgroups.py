"""Control groups of a run on this host: one for its devices and one for its infrastructure, next to the
groups of other processes.

The engine makes a group when it starts the group's first container, and never removes the group. A new
group has the weight of a single process, so two busy processes of the host would take two thirds of a
core from all devices together. Therefore the testbed raises the weight. The quotas of the containers
still limit what a group can use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from agents.device.control_group import ControlGroup

DEVICES, INFRASTRUCTURE = "devices", "infrastructure"
SLICE = ".slice"

_MOUNTS = Path("/proc/self/mounts")
_WEIGHTS = (("cpu.shares", 1024, 262_144), ("cpu.weight", 100, 10_000))
"""For cgroup v1 and v2: name of the file with a group's CPU weight, weight of a single process, and
maximum weight."""


def parent(run: str, group: str, driver: str) -> str:
    """`cgroup_parent` of a container for the engine's cgroup `driver`."""
    if driver == "systemd":  # a dash would make the group a child of another slice
        return f"{_stem(run, group).replace('-', '_')}{SLICE}"
    return f"/{_stem(run, group)}"


def _stem(run: str, group: str) -> str:
    return f"testbed-{run}-{group}"


def folders(run: str, *groups: str, mounts: Path = _MOUNTS) -> list[Path]:
    """Folders that exist. With cgroup v1, a group has a folder in each hierarchy."""
    found = names(run, *groups)
    return sorted({folder for root in _roots(mounts) for name in found for folder in root.glob(name)})


def names(run: str, *groups: str) -> list[str]:
    """Names of folders for both cgroup drivers."""
    return [
        parent(run, group, driver).lstrip("/")
        for group in groups or (DEVICES, INFRASTRUCTURE)
        for driver in ("cgroupfs", "systemd")
    ]


def weights(run: str, groups: Mapping[str, float]) -> list[tuple[Path, str]]:
    """Return the files that hold CPU weights, each with the text to write into it. `groups`: weight of
    each group, as a multiple of the weight of a single process."""
    found = []
    for group, factor in groups.items():
        for folder in folders(run, group):
            for name, single, most in _WEIGHTS:
                if (file := folder / name).exists():
                    found.append((file, str(min(most, round(factor * single)))))
    return found


def cpu_seconds(run: str, group: str) -> float | None:
    found = map(
        _folder_cpu_seconds, folders(run, group)
    )  # if v1 and v2 are mounted, both have the same value
    return next((used for used in found if used is not None), None)


def _folder_cpu_seconds(folder: Path) -> float | None:
    """None if the group's hierarchy does not count CPU time."""
    v1 = (folder / "cpuacct.usage").exists()
    return ControlGroup({"cpuacct" if v1 else "": folder}).cpu_seconds()


def writable(paths: list[Path]) -> bool:
    return all(os.access(path, os.W_OK) for path in paths)


def _roots(mounts: Path) -> Iterator[Path]:
    """Mount points of cgroup hierarchies."""
    try:
        lines = mounts.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, root, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            yield Path(root)
