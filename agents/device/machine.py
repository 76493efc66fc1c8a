"""Machine on which a device's client runs, as its init sees it: a container, or a real device."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from agents.config import AccessLink
from agents.wire.messages import CgroupLimits, UsageSample


class DeviceMachine(Protocol):
    @property
    def title(self) -> str:
        """Name of the machine in messages, such as `the container of pi`."""

    @property
    def reading_due(self) -> float:
        """Monotonic time at which `read_queues` is due; infinite if not before the next sample."""

    def prepare(self, link: AccessLink | None) -> None:
        """Before the client starts. `link`: None if it is not shaped. Raises LinkError, OSError."""

    def shape(self, changes: Mapping[str, Any]) -> None:
        """Change properties of the link, as in `SetLink`. Raises LinkError."""

    def plug(self, *, up: bool) -> None:
        """Block all packets, or let them pass. Raises LinkError."""

    def read_queues(self) -> None: ...

    def sample(self, client: int | None, now: Callable[[], float]) -> UsageSample:
        """`client`: process id. `now`: seconds for the time of the sample. Raises OSError, KeyError."""

    def limits(self) -> CgroupLimits | None:
        """Limits that the kernel enforces now; None if there are none, or if they cannot be read."""

    def faults(self) -> Mapping[str, bool]:
        """Return whether each fault that nobody has ordered is present, by its description."""

    def lasting_faults(self, now: float) -> Mapping[str, float]:
        """By description: monotonic time since which a lasting fault is present."""

    def memory_kills(self) -> tuple[int, int]:
        """Processes that the kernel has killed for exceeding the memory limit, and the limit in bytes;
        (0, 0) if unknown."""

    def cpu_seconds(self) -> float | None:
        """None if they cannot be read."""

    def cores(self) -> float | None:
        """CPU quota in cores; None if there is none."""

    def start(self, command: Sequence[str], inherited: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        """Start a process with the rights of the client and the file descriptors `inherited`."""

    def close(self) -> None: ...
