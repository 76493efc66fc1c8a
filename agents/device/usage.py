"""What a device used, read from its own cgroup (v1 and v2): CPU time, throttling, memory, bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.messages import Sample

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY = (
    ("memory.events", "memory.max"),
    ("memory/memory.oom_control", "memory/memory.limit_in_bytes"),
)
"""What tells of kills, and the limit: of v2, of v1."""


def sample(device: str, pid: int | None, now: Callable[[], float] = time.monotonic) -> Sample:
    """Of `device`, which is this container; `pid` is its client's. Counters run since its start."""
    received, sent = _traffic()
    at = now()
    demand = {} if pid is None else schedstat(pid)
    return Sample(
        device=device, at=at, **_cpu(), **demand, memory=_memory(pid), received=received, sent=sent
    )


def killed_for_memory() -> int | None:
    """This container's limit in bytes where the kernel has killed a process in it for lack of memory."""
    for events, limit in _MEMORY:
        try:
            if _pairs(_CGROUP / events)["oom_kill"]:
                return int((_CGROUP / limit).read_text())
        except (OSError, ValueError, KeyError):  # the other version, or no limit
            continue
    return None


def schedstat(pid: int) -> dict[str, Any]:
    """`ran` and `waited` of the process's main thread, in seconds (see `agents.messages.Sample`); empty
    where it has ended, or the kernel does not count them."""
    try:
        ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return {}
    return {"ran": int(ran) / 1e9, "waited": int(waited) / 1e9}


def _memory(pid: int | None) -> int:
    """Resident bytes of its client; 0 where there is none."""
    try:
        resident = "0 0" if pid is None else Path(f"/proc/{pid}/statm").read_text()
    except OSError:
        return 0
    return int(resident.split()[1]) * os.sysconf("SC_PAGESIZE")


def _cpu() -> dict[str, Any]:
    unified = _CGROUP / "cpu.stat"
    if unified.exists():  # cgroup v2
        stat = _pairs(unified)
        return {
            "cpu": stat["usage_usec"] / 1e6,
            "periods": stat.get("nr_periods", 0),
            "throttled_periods": stat.get("nr_throttled", 0),
            "throttled": stat.get("throttled_usec", 0) / 1e6,
        }
    stat = _pairs(_CGROUP / "cpu" / "cpu.stat")
    used = int((_CGROUP / "cpuacct" / "cpuacct.usage").read_text())
    return {
        "cpu": used / 1e9,
        "periods": stat["nr_periods"],
        "throttled_periods": stat["nr_throttled"],
        "throttled": stat["throttled_time"] / 1e9,
    }


def _pairs(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {name: int(value) for name, value in lines}


def _traffic() -> tuple[int, int]:
    """Bytes received and sent over all interfaces except loopback and ifb (counted twice there)."""
    received = sent = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip().startswith("eth"):
            values = counters.split()
            received, sent = received + int(values[0]), sent + int(values[8])
    return received, sent
