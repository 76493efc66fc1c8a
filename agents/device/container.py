"""The container of an emulated device: its link is shaped, a control group limits it, and its client is
an ordinary user."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from agents.config import AccessLink
from agents.device import link, resource_usage
from agents.device.control_group import ControlGroup
from agents.device.machine import DeviceMachine
from agents.device.shaped_link import ShapedLink
from agents.wire.messages import CgroupLimits, UsageSample


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
        sample = resource_usage.sample(self._device, self._group, client, now)
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
