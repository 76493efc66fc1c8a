"""Control groups of this host that the containers of a run share: one for its devices and one for its
infrastructure, beside the groups of all else that runs here.

The engine makes a group with its first container and leaves it behind. A group has the weight of a
single process until that is raised: without that, two busy processes of the host take two thirds of a
core from all devices together. What a group may take is still bounded by the quotas of its containers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from agents.device.control_group import ControlGroup

DEVICES, INFRASTRUCTURE = "devices", "infrastructure"
"""The groups of a run."""
SLICE = ".slice"
"""Suffix of a control group of systemd's."""

_MOUNTS = Path("/proc/self/mounts")
_WEIGHTS = (("cpu.shares", 1024, 262_144), ("cpu.weight", 100, 10_000))
"""File, weight of a single process, and the most there can be, of cgroup v1 and v2."""


def parent(run: str, group: str, driver: str) -> str:
    """The `cgroup_parent` of containers of `run`, for the engine's cgroup driver."""
    if driver == "systemd":  # a dash would make it the child of another slice
        return f"{_stem(run, group).replace('-', '_')}{SLICE}"
    return f"/{_stem(run, group)}"


def _stem(run: str, group: str) -> str:
    return f"testbed-{run}-{group}"


def folders(run: str, *groups: str, mounts: Path = _MOUNTS) -> list[Path]:
    """The folders of the groups of `run` that are there: in cgroup v1 one in each hierarchy."""
    found = names(run, *groups)
    return sorted({folder for root in _roots(mounts) for name in found for folder in root.glob(name)})


def names(run: str, *groups: str) -> list[str]:
    """Names of the folders of the groups of `run`, for both cgroup drivers."""
    return [
        parent(run, group, driver).lstrip("/")
        for group in groups or (DEVICES, INFRASTRUCTURE)
        for driver in ("cgroupfs", "systemd")
    ]


def weights(run: str, groups: Mapping[str, float]) -> list[tuple[Path, str]]:
    """The files of CPU weights, each with what to write into it; `groups` has the weight of each group
    in those of a single process."""
    found = []
    for group, factor in groups.items():
        for folder in folders(run, group):
            for name, single, most in _WEIGHTS:
                if (file := folder / name).exists():
                    found.append((file, str(min(most, round(factor * single)))))
    return found


def cpu_seconds(run: str, group: str) -> float | None:
    """CPU seconds that the containers of a group have used; None if it cannot be seen."""
    found = map(_used, folders(run, group))  # of v1 and v2, where both are mounted, either serves
    return next((used for used in found if used is not None), None)


def _used(folder: Path) -> float | None:
    """CPU seconds of the group of `folder`; None if this hierarchy does not count them."""
    v1 = (folder / "cpuacct.usage").exists()
    return ControlGroup({"cpuacct" if v1 else "": folder}).cpu_seconds()


def writable(paths: list[Path]) -> bool:
    """Whether this process may change all of these."""
    return all(os.access(path, os.W_OK) for path in paths)


def _roots(mounts: Path) -> Iterator[Path]:
    """Where cgroup hierarchies are mounted."""
    try:
        lines = mounts.read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, root, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            yield Path(root)
