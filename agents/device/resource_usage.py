"""Resource usage of a device: CPU time and throttling from the container's cgroup (v1 or v2), memory and
network traffic from `/proc`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.device.control_group import ControlGroup
from agents.wire.messages import UsageSample


def sample(
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
