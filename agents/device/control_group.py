"""Limits, counters and usage of a device's processes, as the kernel reports them."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.fields import NO_LIMIT
from agents.wire.messages import CgroupLimits, UsageSample

# Limits and counters of a process's control group, in cgroup v1 or v2, as the kernel reports them.
#
# The paths of the group's files are read from the kernel, because they differ between hosts: some
# engines give a container its own cgroup namespace, others that of the host, and distributions mount the
# hierarchies of v1 in different places and combinations.

_PROC, _MEMINFO = Path("/proc"), Path("/proc/meminfo")
_UNIFIED = ""
"""Key of the v2 hierarchy in mappings whose other keys are the controllers of v1."""
_FILE_BYTES = 4096
"""Every file read here is smaller."""
_V1_UNLIMITED_BYTES = 2**62
"""A v1 limit of this number of bytes or more means that there is no limit."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    folders: Mapping[str, Path]
    """By controller; an empty string for the v2 hierarchy."""

    @classmethod
    def of_process(cls, process: int | str = "self", proc: Path = _PROC) -> ControlGroup:
        """Group as this process sees it; without folders if it is not visible."""
        found: dict[str, Path] = {}
        with suppress(OSError, ValueError):
            paths = dict(_paths(proc / str(process) / "cgroup"))
            for controllers, root, mounted in _mounts(proc / "self" / "mountinfo"):
                for controller in controllers & paths.keys() - found.keys():
                    folder = mounted / _below(paths[controller], root)
                    if folder.is_dir():
                        found[controller] = folder
        return cls(found)

    def limits(self) -> CgroupLimits | None:
        """Limits that the kernel enforces now; None if they cannot be read."""
        try:
            return self._limits_v1() if "cpu" in self.folders else self._limits_v2()
        except (OSError, ValueError, KeyError):
            return None

    def _limits_v1(self) -> CgroupLimits:
        quota, period = self._quota()
        cpu, memory = self.folders["cpu"], self.folders.get("memory")
        most = None if memory is None else _bytes(memory / "memory.limit_in_bytes")
        both = None if memory is None else _bytes(memory / "memory.memsw.limit_in_bytes")
        return CgroupLimits(
            quota=quota,
            period=period,
            shares=int(_read(cpu / "cpu.shares")),
            cpus=_read(self.folders["cpuset"] / "cpuset.cpus") if "cpuset" in self.folders else None,
            memory=most,
            swap=_swap(both if most is None or both in (None, NO_LIMIT) else both - most),
        )

    def _limits_v2(self) -> CgroupLimits:
        quota, period = self._quota()
        folder = self.folders[_UNIFIED]
        cpus = folder / "cpuset.cpus"
        return CgroupLimits(
            quota=quota,
            period=period,
            weight=int(_read(folder / "cpu.weight")),
            cpus=_read(cpus) if cpus.exists() else None,
            memory=_bytes(folder / "memory.max"),
            swap=_swap(_bytes(folder / "memory.swap.max")),
        )

    def cores(self) -> float | None:
        """Quota in cores; None if there is none, or if it cannot be read."""
        with suppress(OSError, ValueError, KeyError):
            quota, period = self._quota()
            return None if quota == NO_LIMIT else quota / period
        return None

    def _quota(self) -> tuple[int, int]:
        """CPU time per period (NO_LIMIT without a quota), and period, in µs. Raises OSError, ValueError,
        KeyError."""
        if (v1 := self.folders.get("cpu")) is not None:
            quota, period = _read(v1 / "cpu.cfs_quota_us"), _read(v1 / "cpu.cfs_period_us")
        else:
            quota, period = _read(self.folders[_UNIFIED] / "cpu.max").split()
        return NO_LIMIT if quota in ("max", "-1") else int(quota), int(period)

    def cpu_seconds(self) -> float | None:
        """None if the kernel does not count them for this group."""
        with suppress(OSError, KeyError):
            if (v1 := self.folders.get("cpuacct")) is not None:
                return int(_read(v1 / "cpuacct.usage")) / 1e9
            return _pairs(self.folders[_UNIFIED] / "cpu.stat")["usage_usec"] / 1e6
        return None

    def throttling(self) -> tuple[int, int, float]:
        """CFS periods in which the group ran, those in which it was throttled, and seconds of
        throttling. Raises OSError, KeyError."""
        if (v1 := self.folders.get("cpu")) is not None:
            stat = _pairs(v1 / "cpu.stat")
            return stat["nr_periods"], stat["nr_throttled"], stat["throttled_time"] / 1e9
        stat = _pairs(self.folders[_UNIFIED] / "cpu.stat")
        throttled = stat.get("throttled_usec", 0) / 1e6  # some kernels have these only with a quota
        return stat.get("nr_periods", 0), stat.get("nr_throttled", 0), throttled

    def memory_kills(self) -> tuple[int, int]:
        """Processes of the group that the kernel has killed for exceeding the memory limit, and the
        limit in bytes; (0, 0) if unknown."""
        with suppress(OSError, KeyError):
            if (v1 := self.folders.get("memory")) is not None:
                kills, limit = _pairs(v1 / "memory.oom_control"), v1 / "memory.limit_in_bytes"
            else:
                folder = self.folders[_UNIFIED]
                kills, limit = _pairs(folder / "memory.events"), folder / "memory.max"
            return kills["oom_kill"], _bytes(limit) or 0
        return 0, 0


def weights_of(shares: int) -> tuple[int, int]:
    """The two v2 weights to which container runtimes may convert CPU shares (opencontainers/cgroups):
    linear in the shares (runc before 1.4), and on the newer curve, which maps the default of 1024 shares
    to the default weight 100."""
    linear = 1 + (shares - 2) * 9999 // 262142
    logarithm = math.log2(shares)
    curve = math.ceil(10 ** ((logarithm * logarithm + 125 * logarithm) / 612 - 7 / 34))
    return linear, 1 if shares <= 2 else min(10_000, curve)


def _paths(file: Path) -> Iterator[tuple[str, str]]:
    """Controller and group's path; for v2 with an empty string as controller."""
    for line in file.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _mounts(file: Path) -> Iterator[tuple[set[str], str, Path]]:
    """Controllers, path of the group at the root of the mount, and mount point, of each mounted
    hierarchy."""
    for line in file.read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, mounted = before.split(" ")[3:5]
        if kind == "cgroup2":
            yield {_UNIFIED}, root, Path(mounted)
        elif kind == "cgroup":
            yield set(options.split(",")), root, Path(mounted)


def _below(path: str, root: str) -> str:
    """Relative to `root`; empty if `path` is not below it, because the mount then shows the group
    itself."""
    if root == "/":
        return path.lstrip("/") if not path.startswith("/..") else ""
    inside = path.removeprefix(root)
    return inside.lstrip("/") if inside != path and inside[:1] in ("", "/") else ""


def _bytes(file: Path) -> int | None:
    """None if this kernel does not have the limit."""
    try:
        text = _read(file)
    except FileNotFoundError:
        return None
    return NO_LIMIT if text == "max" or int(text) >= _V1_UNLIMITED_BYTES else int(text)


def _swap(limit: int | None) -> int | None:
    """Bytes. If the kernel has no swap limit (`limit` is None): 0 if this host has no swap, else
    None."""
    if limit is not None:
        return limit
    return 0 if re.search(r"^SwapTotal: +0 kB$", _MEMINFO.read_text(), re.MULTILINE) else None


def _pairs(file: Path) -> dict[str, int]:
    lines = (line.split() for line in _read(file).splitlines())
    return {name: int(value) for name, value in lines}


def _read(file: Path) -> str:
    """By plain system calls: a device reads every second, and reading uses its own CPU share."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return os.read(descriptor, _FILE_BYTES).decode("ascii").strip()
    finally:
        os.close(descriptor)


def sample_usage(
    device: str, group: ControlGroup, pid: int | None, now: Callable[[], float] = time.monotonic
) -> UsageSample:
    """Since the device's start. `pid`: process of the client. `now`: seconds for the time of the sample.
    Raises OSError, KeyError."""
    received, sent = traffic()
    at = now()
    demand = {} if pid is None else schedstat(pid)
    return UsageSample(
        device=device,
        at=at,
        **cpu_use(group),
        **demand,
        memory=resident_bytes(pid),
        received=received,
        sent=sent,
    )


def schedstat(pid: int) -> dict[str, Any]:
    """`ran`: seconds of the process's main thread on a CPU. `waited`: seconds in which it wanted to run,
    but did not. Empty if the process has ended or the kernel does not count these times."""
    try:
        ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return {}
    return {"ran": int(ran) / 1e9, "waited": int(waited) / 1e9}


def is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return False
    return state == "T"


def resident_bytes(pid: int | None) -> int:
    """Resident bytes of the client; 0 if it is not running."""
    try:
        resident = "0 0" if pid is None else Path(f"/proc/{pid}/statm").read_text()
    except OSError:
        return 0
    return int(resident.split()[1]) * os.sysconf("SC_PAGESIZE")


def cpu_use(group: ControlGroup) -> dict[str, Any]:
    """Fields of a sample. Raises OSError, KeyError."""
    if (used := group.cpu_seconds()) is None:
        raise OSError("the CPU time of the control group cannot be read")
    periods, throttled_periods, throttled = group.throttling()
    return {
        "cpu": used,
        "periods": periods,
        "throttled_periods": throttled_periods,
        "throttled": throttled,
    }


def traffic() -> tuple[int, int]:
    """Bytes received and sent over all interfaces except loopback and ifb, with which they would count
    twice."""
    received = sent = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        if not name.strip().startswith(("lo", "ifb")):
            values = counters.split()
            received, sent = received + int(values[0]), sent + int(values[8])
    return received, sent
