"""A real device: nothing of it is limited or shaped, and only what the client uses is measured."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agents.config import AccessLink
from agents.device import resource_usage
from agents.device.link import LinkError
from agents.device.machine import DeviceMachine
from agents.wire.messages import CgroupLimits, UsageSample


class RealMachine(DeviceMachine):
    """The real device `device`. The client runs as the user who has started the init, and ends with
    it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._client: int | None = None
        """Process id of the last client; None before the first."""

    @property
    def title(self) -> str:
        return f"the init of {self._device}"

    @property
    def reading_due(self) -> float:
        return math.inf

    def prepare(self, link: AccessLink | None) -> None:
        if link is not None:
            raise LinkError(f"{self._device} is a real device, whose link cannot be shaped")

    def shape(self, changes: Mapping[str, Any]) -> None:
        raise LinkError(f"{self._device} is a real device, whose link cannot be shaped")

    def plug(self, *, up: bool) -> None:
        """Do nothing if `up` is true, because the network of a real device is never cut off."""
        if not up:
            raise LinkError(f"{self._device} is a real device, whose network cannot be cut off")

    def read_queues(self) -> None:
        """Do nothing, because the queues are not the testbed's."""

    def sample(self, client: int | None, now: Callable[[], float]) -> UsageSample:
        demand = {} if client is None else resource_usage.schedstat(client)
        return UsageSample(
            device=self._device,
            at=now(),
            cpu=self.cpu_seconds(),
            memory=resource_usage.resident_bytes(client),
            **demand,
        )

    def limits(self) -> CgroupLimits | None:
        return None

    def faults(self) -> Mapping[str, bool]:
        return {}

    def lasting_faults(self, now: float) -> Mapping[str, float]:
        return {}

    def killed_for_memory(self) -> int | None:
        return None

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all clients that this init has started."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        running = 0.0
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{self._client}/stat").read_text().rpartition(") ")[2].split()
            running = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return ended.ru_utime + ended.ru_stime + running

    def cores(self) -> float | None:
        return None

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        bound = [sys.executable, "-m", "agents.device.bound", str(os.getpid())]
        started = subprocess.Popen([*bound, *command])
        self._client = started.pid
        return started

    def close(self) -> None:
        """Do nothing, because nothing is open."""
