"""The shaped link of a device: its settings, what it carries, and its lasting faults."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agents.config import AccessLink
from agents.device import link
from agents.device.netlink import Netlink
from agents.disturbances import UNANSWERED_SECONDS, cut
from agents.wire.messages import QueueUse

_READ_SECONDS = 0.1
"""Between two readings of a queue while packets wait: half of the time in which a full queue drains."""


class ShapedLink:
    """`netem`: the kernel's netem emulates delay, jitter and loss there. `ifb`: interface that is made
    for the downlink."""

    def __init__(self, device: str, interface: str, *, netem: bool, ifb: str = link.IFB) -> None:
        self._device, self._interface, self._netem, self._ifb = device, interface, netem, ifb
        self._link: AccessLink | None = None
        """Settings that were applied last."""
        self._usage: link.LinkUsage | None = None
        """None while the link is not shaped."""
        self._plugged = True
        """Whether the interface should be up according to the last order; True if there was no order."""
        self._netlink = Netlink()
        self.reading_due = math.inf
        """Monotonic time at which `read_queues` is due; infinite if not."""

    def apply(self, wanted: AccessLink) -> None:
        """Raises LinkError."""
        self.read_queues()
        link.apply(wanted, self._interface, self._link, netem=self._netem, ifb=self._ifb)
        self._link = wanted
        if self._usage is None:
            self._usage = link.LinkUsage(self._interface, self._netlink, self._ifb)
        self._usage.pause()  # since the last reading, either rate may have applied
        self.read_queues()

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change properties of the link, as in `SetLink`. Raises LinkError."""
        lifted = {name: link.LIFTED if value is None else value for name, value in changes.items()}
        self.apply(replace(self._link or AccessLink(), **lifted))

    def plug(self, *, up: bool) -> None:
        """Raises LinkError."""
        self.read_queues()
        link.plug(self._interface, up=up)
        self._plugged = up
        if self._usage is not None:
            self._usage.pause()

    def read_queues(self) -> None:
        """If packets wait, schedule the next reading: only the time during which they wait says
        something about the link."""
        self.reading_due = math.inf
        if self._usage is None or self._link is None or not self._plugged:
            return
        now = time.monotonic()
        try:
            is_waiting = self._usage.read(self._link, now)
        except OSError:  # the interface was removed from outside
            self._usage.pause()
        else:
            self.reading_due = now + _READ_SECONDS if is_waiting else math.inf

    def uses(self) -> dict[str, QueueUse]:
        """Fields `uplink` and `downlink` of a sample, if the direction has a limit."""
        found = {} if self._usage is None else self._usage.uses()
        return {f"{way}link": use for way, use in found.items()}

    @property
    def is_cut(self) -> bool:
        """No carrier, although nobody has ordered that."""
        return self._plugged and not link.has_carrier(self._interface)

    def stuck_queues(self) -> dict[str, float]:
        """By description: monotonic time since which a stuck queue has sent nothing."""
        stuck = {} if self._usage is None else self._usage.stuck_since()
        return {
            f"the {way}link of {self._device} carried nothing though packets waited": since
            for way, since in stuck.items()
        }

    def lasting_faults(self, now: float) -> dict[str, float]:
        """Like `stuck_queues`, with rates that were altered from outside, and a connection of the
        network namespace without answers. `now`: monotonic time."""
        altered = {} if self._usage is None else self._usage.altered_since()
        found = self.stuck_queues() | {
            f"the rate of the {way}link of {self._device} was altered from outside": since
            for way, since in altered.items()
        }
        silent = max((one.unanswered for one in self._netlink.connections()), default=0.0)
        if self._plugged and silent >= UNANSWERED_SECONDS + link.full_queue_seconds(self._link):
            found[cut(self._device)] = now - silent
        return found

    def close(self) -> None:
        self._netlink.close()
