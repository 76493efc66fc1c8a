"""CPU time that other programs, and other machines of the hypervisor, take from this host."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HYPERVISOR = "the hypervisor"
_ENGINES = {"containerd", "containerd-shim-runc-v2", "dockerd", "podman", "runc", "systemd"}
"""Programs that work for a run without being started by it."""
_KERNEL_THREADS = 2
"""Process id of the parent of the kernel's threads, which work for whoever sends packets."""


@dataclass(frozen=True, slots=True)
class ProcessTime:
    name: str
    parent: int
    """Id of the parent process."""
    seconds: float
    """CPU seconds of the process, and of its children that have ended."""


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU times of all processes at one moment."""

    processes: Mapping[tuple[int, float], ProcessTime]
    """By id and start time of a process."""
    stolen: float = 0.0
    """CPU seconds that the hypervisor has given to other machines."""
    at: float = field(default_factory=time.monotonic)


def read() -> CpuReading:
    """Takes some hundredths of a second."""
    processes = {}
    for process in psutil.process_iter(["name", "ppid", "create_time", "cpu_times"]):
        found = process.info
        if (times := found["cpu_times"]) is not None:  # else it is hidden from this user
            used = ProcessTime(found["name"] or "?", found["ppid"] or 0, sum(times[:4]))
            processes[process.pid, found["create_time"] or 0.0] = used
    return CpuReading(processes, getattr(psutil.cpu_times(), "steal", 0.0))


def used_between(
    before: CpuReading, now: CpuReading, is_own: Callable[[int], bool] = lambda _: False
) -> dict[str, float]:
    """Return the CPU seconds of each program, largest first. `is_own`: whether the process of an id is
    left out.

    A process that has ended meanwhile counts for its parent, which inherits its CPU time.
    """
    inherited = Counter[int]()
    for key, one in before.processes.items():
        if key not in now.processes:
            inherited[one.parent] += one.seconds  # type: ignore[assignment]
    used = {HYPERVISOR: now.stolen - before.stolen}
    for key, one in now.processes.items():
        known = before.processes.get(key)
        seconds = one.seconds - (0.0 if known is None else known.seconds) - inherited[key[0]]
        if seconds > 0 and not is_own(key[0]):
            used[f"{one.name} ({key[0]})"] = seconds
    return {name: one for name, one in sorted(used.items(), key=lambda each: -each[1]) if one > 0}


def is_of_run(now: CpuReading, groups: Collection[str]) -> Callable[[int], bool]:
    """Return the function `is_own`. A run has this process with all its descendants, and the processes
    in control groups with a name in `groups`. Engines and threads of the kernel work for the run,
    too."""
    found = {pid: one for (pid, _), one in now.processes.items()}

    def is_own(pid: int) -> bool:
        if found[pid].name in _ENGINES:
            return True
        with suppress(OSError):  # not Linux, or it has ended
            path = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
            if any(group in path for group in groups):
                return True
        while pid in found and pid not in (os.getpid(), _KERNEL_THREADS):
            pid = found[pid].parent
        return pid in (os.getpid(), _KERNEL_THREADS)

    return is_own
