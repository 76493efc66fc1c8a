"""Interface between a device's init and the machine on which its client runs: a container, or a real
device."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from agents.config import AccessLink
from agents.wire.messages import CgroupLimits, UsageSample


class DeviceMachine(Protocol):
    """The machine of a device, as its init sees it."""

    @property
    def title(self) -> str:
        """Name of the machine in messages, such as `the container of pi`."""

    @property
    def reading_due(self) -> float:
        """Time in seconds on the monotonic clock at which `read_queues` is due; infinite if no reading
        is needed before the next sample."""

    def prepare(self, link: AccessLink | None) -> None:
        """Prepare the machine for the client, and shape its link as in `link`; None if it is not shaped.
        Raises LinkError, OSError."""

    def shape(self, changes: Mapping[str, Any]) -> None:
        """Change properties of the link, as in `SetLink`. Raises LinkError."""

    def plug(self, *, up: bool) -> None:
        """Block all packets, or let them pass. Raises LinkError."""

    def read_queues(self) -> None:
        """Read the counters of the link's queues."""

    def sample(self, client: int | None, now: Callable[[], float]) -> UsageSample:
        """Return the resources that the device has used. `client`: process id of the client; None if no
        client runs. `now`: clock for the time of the sample, in seconds. Raises OSError, KeyError."""

    def limits(self) -> CgroupLimits | None:
        """Return the limits that the kernel enforces now; None if there are none, or if they cannot be
        read."""

    def faults(self) -> Mapping[str, bool]:
        """Return whether each fault that nobody has ordered is present, by its description."""

    def lasting_faults(self, now: float) -> Mapping[str, float]:
        """Return the time since which each lasting fault is present, by its description. Times, and
        `now`, are seconds on the monotonic clock."""

    def memory_kills(self) -> tuple[int, int]:
        """Return the number of the device's processes that the kernel has killed for exceeding the
        memory limit, and the limit in bytes; (0, 0) if that is unknown."""

    def cpu_seconds(self) -> float | None:
        """Return the CPU seconds that the device has used so far; None if they cannot be read."""

    def cores(self) -> float | None:
        """Return the CPU quota as a number of cores; None if there is no quota."""

    def start(self, command: Sequence[str], inherited: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        """Start a process with the rights of the client and the file descriptors `inherited`."""

    def close(self) -> None:
        """Release all files and sockets."""
