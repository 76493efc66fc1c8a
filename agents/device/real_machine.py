"""A real device. Only what the client uses is measured, and nothing is limited, unless its group has
`shape: true`: then its link is shaped, and a control group limits its CPU."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import structs

from agents.config import AccessLink
from agents.device import control_group
from agents.device.control_group import ControlGroup
from agents.device.link import LinkError, ShapedLink
from agents.device.machine import DeviceMachine
from agents.wire.messages import CgroupLimits, UsageSample


class RealMachine(DeviceMachine):
    """The client runs as the init's user, and ends with the init. `netem`: its shaped link has delay,
    jitter or loss. `is_limited`: the init is in a control group of its own, which limits the CPU."""

    def __init__(self, device: str, *, netem: bool, is_limited: bool) -> None:
        self._device, self._netem = device, netem
        self._client: int | None = None
        self._link: ShapedLink | None = None
        self._group = ControlGroup.of_process() if is_limited else None

    @property
    def title(self) -> str:
        return f"the init of {self._device}"

    @property
    def reading_due(self) -> float:
        return math.inf if self._link is None else self._link.reading_due

    def prepare(self, link: AccessLink | None) -> None:
        """Shape the link at the interface in the file LIMITS; the controller's program removes all of it
        later."""
        if link is not None:
            # Imported here, because containers do not need it.
            from agents.remote.program import LIMITS, SHAPED

            noted = json.loads(Path(LIMITS).read_text(encoding="utf-8"))
            made = ShapedLink(self._device, noted["interface"], netem=self._netem, ifb=noted["ifb"])
            made.apply(link)
            self._link = made
            Path(SHAPED).touch()

    def shape(self, changes: Mapping[str, Any]) -> None:
        raise LinkError(f"{self._device} is a real device, whose link does not change")

    def plug(self, *, up: bool) -> None:
        """The network of a real device is never cut off."""
        if not up:
            raise LinkError(f"{self._device} is a real device, whose network cannot be cut off")

    def read_queues(self) -> None:
        if self._link is not None:
            self._link.read_queues()

    def sample(self, client: int | None, now: Callable[[], float]) -> UsageSample:
        demand = {} if client is None else control_group.schedstat(client)
        group = self._group
        used = {"cpu": self.cpu_seconds()} if group is None else control_group.cpu_use(group)
        memory = control_group.resident_bytes(client)
        sample = UsageSample(device=self._device, at=now(), **used, **demand, memory=memory)
        return sample if self._link is None else structs.replace(sample, **self._link.uses())

    def limits(self) -> CgroupLimits | None:
        return None if self._group is None else self._group.limits()

    def faults(self) -> Mapping[str, bool]:
        return {}

    def lasting_faults(self, now: float) -> Mapping[str, float]:
        return {} if self._link is None else self._link.stuck_queues()

    def memory_kills(self) -> tuple[int, int]:
        return 0, 0

    def cpu_seconds(self) -> float:
        """All clients that this init has started."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        running = 0.0
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{self._client}/stat").read_text().rpartition(") ")[2].split()
            running = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return ended.ru_utime + ended.ru_stime + running

    def cores(self) -> float | None:
        return None if self._group is None else self._group.cores()

    def start(self, command: Sequence[str], inherited: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        bound = [sys.executable, "-m", "agents.device.bound", str(os.getpid())]
        started = subprocess.Popen([*bound, *command], pass_fds=inherited)
        self._client = started.pid
        return started

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
