"""The container of an emulated device. Its link is shaped, a control group limits it, and its client is
an ordinary user."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from agents.config import AccessLink
from agents.device import link, resource_usage
from agents.device.control_group import ControlGroup
from agents.device.machine import DeviceMachine
from agents.device.netlink import Netlink
from agents.disturbances import UNANSWERED_SECONDS, cut
from agents.wire.messages import CgroupLimits, UsageSample

_READ_SECONDS = 0.1
"""Seconds between two readings of a link's queue while packets wait: half of the time in which a full
queue drains."""


class DeviceContainer(DeviceMachine):
    """The container of the device `device`. `netem`: whether the kernel's netem emulates delay, jitter
    and loss in it. `user`: numeric id of the user and group of its client."""

    def __init__(self, device: str, *, netem: bool, user: int) -> None:
        self._device, self._netem, self._user = device, netem, user
        self._link: AccessLink | None = None
        """Link settings that were applied last; None if the interface was never shaped."""
        self._interface = link.interface()
        self._usage: link.LinkUsage | None = None
        """Measurement of the bytes that the link carries; None while the link is not shaped."""
        self._reading_due = math.inf
        self._plugged = True
        """Whether the interface should be up according to the last order; True if there was no order."""
        self._netlink = Netlink()
        self._group = ControlGroup.of_process()

    @property
    def title(self) -> str:
        return f"the container of {self._device}"

    @property
    def reading_due(self) -> float:
        return self._reading_due

    def prepare(self, link: AccessLink | None) -> None:
        if self._group.limits() is None:
            raise OSError("the limits are unknown, because the container's control group cannot be read")
        if link is not None:
            self._apply(link)

    def shape(self, changes: Mapping[str, Any]) -> None:
        lifted = {name: link.LIFTED if value is None else value for name, value in changes.items()}
        self._apply(replace(self._link or AccessLink(), **lifted))

    def _apply(self, wanted: AccessLink) -> None:
        self.read_queues()
        link.apply(wanted, self._interface, self._link, netem=self._netem)
        self._link = wanted
        if self._usage is None:
            self._usage = link.LinkUsage(self._interface, self._netlink)
        self._usage.pause()  # since the last reading, either rate may have applied
        self.read_queues()

    def plug(self, *, up: bool) -> None:
        self.read_queues()
        link.plug(self._interface, up=up)
        self._plugged = up
        if self._usage is not None:
            self._usage.pause()

    def read_queues(self) -> None:
        """Read the counters of the link. If packets wait, schedule the next reading, because only the
        time during which packets wait says something about the link."""
        self._reading_due = math.inf
        if self._usage is None or self._link is None or not self._plugged:
            return
        now = time.monotonic()
        try:
            is_waiting = self._usage.read(self._link, now)
        except (OSError, KeyError):  # the interface or its queue was removed from outside
            self._usage.pause()
        else:
            self._reading_due = now + _READ_SECONDS if is_waiting else math.inf

    def sample(self, client: int | None, now: Callable[[], float]) -> UsageSample:
        queues = {} if self._usage is None else self._usage.uses()
        sample = resource_usage.sample(self._device, self._group, client, now)
        return structs.replace(sample, uplink=queues.get("up"), downlink=queues.get("down"))

    def limits(self) -> CgroupLimits | None:
        return self._group.limits()

    def faults(self) -> Mapping[str, bool]:
        is_cut = self._plugged and not link.has_carrier(self._interface)
        return {f"the network interface of {self._device} was cut off from outside": is_cut}

    def lasting_faults(self, now: float) -> Mapping[str, float]:
        found = {}
        for way, since in ({} if self._usage is None else self._usage.stuck_since()).items():
            found[f"the {way}link of {self._device} carried nothing though packets waited"] = since
        silent = max((one.unanswered for one in self._netlink.connections()), default=0.0)
        if self._plugged and silent >= UNANSWERED_SECONDS + link.full_queue_seconds(self._link):
            found[cut(self._device)] = now - silent
        return found

    def killed_for_memory(self) -> int | None:
        return self._group.killed_for_memory()

    def cpu_seconds(self) -> float | None:
        return self._group.cpu_seconds()

    def cores(self) -> float | None:
        return self._group.cores()

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, user=self._user, group=self._user, extra_groups=[])

    def close(self) -> None:
        self._netlink.close()
