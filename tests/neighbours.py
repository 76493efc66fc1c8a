"""Work that is not the tests'. A test that measures seconds, rates or shares is wrong beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

import psutil

from testbed.host import cpus
from testbed.host.cpus import CpuReading

BUSY_CORES = 0.1
"""Cores that others may use during a measurement."""
_CONTAINERS = ("docker", "testbed")
"""Names in the paths of control groups of the engine's containers and of runs."""
_NAMED = 3


def busy_since(before: CpuReading, now: CpuReading | None = None) -> str | None:
    """Return who used the host since `before`, and how much; None if it was at most `BUSY_CORES`."""
    now = now or cpus.read_cpu_times()
    used = cpus.used_between(before, now, _is_of_tests(now))
    total, seconds = math.fsum(used.values()), now.at - before.at
    if total <= BUSY_CORES * seconds:
        return None
    who = ", ".join(f"{name} {one:.1f} s" for name, one in [*used.items()][:_NAMED])
    return f"busy host: others used {total:.1f} CPU seconds in {seconds:.1f} s: {who}"


def _is_of_tests(now: CpuReading) -> Callable[[int], bool]:
    """Return the function that says whether the tests started a process, or an engine did for them."""
    is_of_run = cpus.is_of_run(now, _CONTAINERS)

    def is_own(pid: int) -> bool:
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if "PYTEST_CURRENT_TEST" in psutil.Process(pid).environ():
                return True
        return is_of_run(pid)

    return is_own
