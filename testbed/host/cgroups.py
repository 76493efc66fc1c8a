"""Control groups of this host that the containers of a run share: one for its devices and one for its
infrastructure, beside the groups of all else that runs here.

The engine makes a group with its first container and leaves it behind. A group has the weight of a
single process until that is raised: without that, two busy processes of the host take two thirds of a
core from all devices together. What a group may take is still bounded by the quotas of its containers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")
_DEFAULT_SHARES, _MAX_SHARES = 1024, 262_144  # of cgroup v1
_DEFAULT_WEIGHT, _MAX_WEIGHT = 100, 10_000  # of cgroup v2


def parent(run: str, part: str, driver: str) -> str:
    """The `cgroup_parent` of containers of `run`, for the engine's cgroup driver."""
    if driver == "systemd":  # a dash would make it the child of another slice
        return f"{_stem(run, part).replace('-', '_')}.slice"
    return f"/{_stem(run, part)}"


def _stem(run: str, part: str) -> str:
    return f"testbed-{run}-{part}"


def folders(run: str, part: str = "*", mounts: Path = _MOUNTS) -> list[Path]:
    """The folders of the groups of `run` that are there: in cgroup v1 one in each hierarchy."""
    patterns = [parent(run, part, driver).lstrip("/") for driver in ("cgroupfs", "systemd")]
    return sorted({found for root in _roots(mounts) for p in patterns for found in root.glob(p)})


def weight(folder: Path, factor: float) -> tuple[Path, str] | None:
    """The file, and what to write into it, for a weight of `factor` times that of a single process; None
    where the folder is of a hierarchy that has no weights."""
    if (file := folder / "cpu.shares").exists():
        return file, str(min(_MAX_SHARES, round(factor * _DEFAULT_SHARES)))
    if (file := folder / "cpu.weight").exists():
        return file, str(min(_MAX_WEIGHT, round(factor * _DEFAULT_WEIGHT)))
    return None


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
