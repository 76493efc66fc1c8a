"""CPU time of work that is not the tests': a test that measures seconds, rates or shares is wrong beside it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

BUSY_CORES = 0.1
"""Cores that others may use during a measurement."""
_ENGINES = {"containerd", "containerd-shim-runc-v2", "dockerd", "podman", "runc", "systemd"}
"""Programs that work for the tests without being started by them."""
_NAMED = 3


@dataclass(frozen=True)
class Use:
    """CPU seconds since boot, by neighbour; `steal` is what the hypervisor gave to other machines."""

    seconds: Mapping[tuple[int, str], float]
    at: float = field(default_factory=time.monotonic)


def use() -> Use:
    """Return what the neighbours have used so far."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    seconds = {(0, "steal"): getattr(psutil.cpu_times(), "steal", 0.0)}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid in own or _is_ours(process):
                continue
            times = process.cpu_times()
            seconds[process.pid, process.name()] = times.user + times.system
    return Use(seconds)


def _is_ours(process: psutil.Process) -> bool:
    """Whether the tests started `process`, or an engine did for them, or it is a thread of the kernel, which
    works for whoever sends packets and writes files."""
    if process.pid == 2 or process.ppid() == 2 or process.name() in _ENGINES:
        return True
    with suppress(psutil.AccessDenied):
        if "PYTEST_CURRENT_TEST" in process.environ():
            return True
    with open(f"/proc/{process.pid}/cgroup", encoding="utf-8") as groups:
        return "docker" in groups.read()


def busy_since(before: Use) -> str | None:
    """Return who used the host since `before`, and how much; None if it was less than `BUSY_CORES`."""
    now = use()
    passed = now.at - before.at
    spent = {who: total - before.seconds.get(who, 0.0) for who, total in now.seconds.items()}
    if sum(spent.values()) <= BUSY_CORES * passed:
        return None
    most = sorted(spent.items(), key=lambda one: -one[1])[:_NAMED]
    names = ", ".join(f"{name} ({pid}) {used:.1f} s" for (pid, name), used in most if used > 0)
    return f"busy host: others used {sum(spent.values()):.1f} CPU seconds in {passed:.1f} s: {names}"
