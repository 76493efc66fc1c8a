"""CPUs of this host: sets of them, wake-up latency, the time that other work takes, energy counters, and
the kernels that NumPy and PyTorch have for them."""

from __future__ import annotations

import functools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController


def cpu_numbers(cpuset: str) -> set[int]:
    """`0-2,5` is {0, 1, 2, 5}; an empty text is the empty set."""
    numbers: set[int] = set()
    for part in filter(None, cpuset.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def cpuset(cores: Sequence[int]) -> str:
    """Format sorted CPU numbers: `0`, `1-3`, `0,2-3`."""
    ranges: list[list[int]] = []
    for core in cores:
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1][1:] = [core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, span)) for span in ranges)


# CPU wake-up latency: keep cores awake while a run measures.
#
# A throttled device works in slices of milliseconds. If a core sleeps between two slices, waking the
# core can take longer than the work of the slice, and the kernel counts the wake-up as CPU time of the
# device (measured: docs/evidence/cpu.md). The kernel's PM QoS prevents all sleep states that need longer
# than 0 µs to wake up while a process keeps the device file open. The setting therefore ends with the
# process, even if the process is killed.

LATENCY = Path("/dev/cpu_dma_latency")
"""Device file of PM QoS. A process writes the longest wake-up time that it accepts, in µs, as a native
32-bit integer."""


@contextmanager
def keep_awake(latency: Path = LATENCY) -> Iterator[bool]:
    """Yield whether the host allows it."""
    try:
        file = os.open(latency, os.O_WRONLY)
    except OSError:
        yield False
        return
    try:
        os.write(file, bytes(4))
        yield True
    finally:
        os.close(file)


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


def read_cpu_times() -> CpuReading:
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


POWERCAP = Path("/sys/class/powercap")
_ZONE = re.compile(r"intel-rapl:[0-9]+")
"""Folder of a processor. Parts of a processor, such as its memory, have longer names."""
_MICROJOULES_PER_JOULE = 1e6


@dataclass(frozen=True, slots=True)
class RaplSurvey:
    readable: Mapping[str, Path]
    """Name of each processor, such as `package-0` -> its folder."""
    unreadable: tuple[str, ...]
    """Processors whose counter exists, but may not be read by this user."""


def rapl_survey(powercap: Path = POWERCAP) -> RaplSurvey:
    """Most virtual machines have no counters."""
    readable: dict[str, Path] = {}
    unreadable: list[str] = []
    for folder in sorted(powercap.glob("intel-rapl:*")):
        if _ZONE.fullmatch(folder.name) is None:
            continue
        try:
            name = (folder / "name").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if not name.startswith("package"):  # `psys` contains the packages
            continue
        try:
            _microjoules(folder / "energy_uj")
        except (OSError, ValueError):
            unreadable.append(name)
        else:
            readable[name] = folder
    return RaplSurvey(readable, tuple(unreadable))


class RaplMeter:
    """Sum of the energy of the processors in `folders` since the meter was made. Call `joules` at least
    once per minute, because a counter starts again from 0 when it has reached its largest value."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = tuple(folders.values())
        self._ranges = [_microjoules(folder / "max_energy_range_uj") for folder in self._folders]
        self._last = self._read()
        self._sum = 0

    def joules(self) -> float:
        """Energy since the meter was made. Raises OSError, ValueError."""
        now = self._read()
        for before, after, size in zip(self._last, now, self._ranges, strict=True):
            self._sum += after - before if after >= before else after - before + size
        self._last = now
        return self._sum / _MICROJOULES_PER_JOULE

    def _read(self) -> list[int]:
        return [_microjoules(folder / "energy_uj") for folder in self._folders]


def rapl_meter(powercap: Path = POWERCAP) -> RaplMeter | None:
    """None if not all processors of this host can be read."""
    found = rapl_survey(powercap)
    if not found.readable or found.unreadable:
        return None
    try:
        return RaplMeter(found.readable)
    except (OSError, ValueError):
        return None


def _microjoules(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))


# Kernels of NumPy and PyTorch. Each processor has its own, which add in another order and so round
# otherwise.

_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NPY_DISABLE_CPU_FEATURES",
    "NPY_ENABLE_CPU_FEATURES",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
)
"""Users choose the kernels of NumPy and PyTorch by them."""


def chosen_kernels() -> dict[str, str]:
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


@functools.cache  # the search takes 2 ms
def _libraries() -> ThreadpoolController:
    import numpy as np  # noqa: F401  # loads its BLAS
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def one_blas_thread() -> AbstractContextManager[object]:
    """Several threads would share a sum, so that its rounding would depend on the number of cores."""
    limited: AbstractContextManager[object] = _libraries().limit(limits=1)
    return limited


def blas() -> str:
    """Name and version of NumPy's BLAS, and the processors that its kernels are for, such as `openblas
    0.3.31 (Haswell)`."""
    # SciPy may have another one.
    found = sorted(_libraries().info(), key=lambda one: "numpy" not in one["filepath"])
    if not found:
        return "unknown"
    kernels = f" ({found[0]['architecture']})" if found[0].get("architecture") else ""
    return f"{found[0]['internal_api']} {found[0]['version']}{kernels}"
