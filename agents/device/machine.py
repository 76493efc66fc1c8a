"""The machine on which a device's client runs, and the container of an emulated device."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import structs

from agents.config import AccessLink
from agents.device import control_group, link
from agents.device.control_group import ControlGroup
from agents.device.link import ShapedLink
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


class DeviceContainer(DeviceMachine):
    """`netem`: the kernel's netem emulates delay, jitter and loss in it. `user`: id of its client's user
    and group."""

    def __init__(self, device: str, *, netem: bool, user: int) -> None:
        self._device, self._user = device, user
        self._link = ShapedLink(device, link.interface(), netem=netem)
        self._group = ControlGroup.of_process()

    @property
    def title(self) -> str:
        return f"the container of {self._device}"

    @property
    def reading_due(self) -> float:
        return self._link.reading_due

    def prepare(self, link: AccessLink | None) -> None:
        if self._group.limits() is None:
            raise OSError("the limits are unknown, because the container's control group cannot be read")
        if link is not None:
            self._link.apply(link)

    def shape(self, changes: Mapping[str, Any]) -> None:
        self._link.change(changes)

    def plug(self, *, up: bool) -> None:
        self._link.plug(up=up)

    def read_queues(self) -> None:
        self._link.read_queues()

    def sample(self, client: int | None, now: Callable[[], float]) -> UsageSample:
        sample = control_group.sample_usage(self._device, self._group, client, now)
        return structs.replace(sample, **self._link.uses())

    def limits(self) -> CgroupLimits | None:
        return self._group.limits()

    def faults(self) -> Mapping[str, bool]:
        reason = f"the network interface of {self._device} was cut off from outside"
        return {reason: self._link.is_cut}

    def lasting_faults(self, now: float) -> Mapping[str, float]:
        return self._link.lasting_faults(now)

    def memory_kills(self) -> tuple[int, int]:
        return self._group.memory_kills()

    def cpu_seconds(self) -> float | None:
        return self._group.cpu_seconds()

    def cores(self) -> float | None:
        return self._group.cores()

    def start(self, command: Sequence[str], inherited: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, user=self._user, group=self._user, extra_groups=[], pass_fds=inherited
        )

    def close(self) -> None:
        self._link.close()
