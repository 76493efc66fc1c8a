"""Schedule of background traffic in real time: sizes, and when to send them. Neither I/O nor a
clock: the time is an argument.

A loop sends the traffic of a source like this:

    source = schedule(traffic, seed, segment, epoch=epoch, dilation=dilation, now=now)
    while the loop runs:
        wait until source.next
        for size in source.take(now): send size bytes

All times are seconds of a monotonic clock; traffic itself is in device time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from agents.config import Background
from agents.device.backlog import PACKET
from agents.links import background
from agents.links.background import RateChange, Transfer

_TICK_SECONDS = 0.002
"""Minimum between two moments at which traffic of a given rate is sent."""
_ROUNDING_BYTES = 1e-3
"""May be missing from a packet, because times are rounded."""
_MAX_BEHIND_SECONDS = 0.05
"""Traffic of a given rate that is not sent in time is made up for if it is at most this late."""
_MAX_LATE_SECONDS = 1.0
"""Transfers that should have begun longer ago, such as before the start of a resumed run, are left
out."""


class RateSchedule:
    """A given rate, in full packets."""

    def __init__(self, changes: Iterator[RateChange], epoch: float, dilation: float, now: float) -> None:
        """`epoch`: the run's start. `dilation`: host seconds per second of device time."""
        self._changes = ((epoch + at * dilation, rate / 8 / dilation) for at, rate in changes)
        self._change = next(self._changes, None)
        """Time, and new rate in bytes per second."""
        self._rate = 0.0
        """Bytes per second."""
        self._owed = 0.0
        """Bytes that are due at the time `_at` but not sent."""
        self._at = self.next = now
        """`next`: when to call `take` again; infinite if nothing more is sent."""

    def take(self, now: float) -> Sequence[int]:
        """Bytes on the wire to send now: one size, or none."""
        at = self._at + max(0.0, now - self.next - _MAX_BEHIND_SECONDS)
        while self._change is not None and self._change[0] <= now:
            changes, rate = self._change
            self._owed += max(0.0, changes - at) * self._rate
            at, self._rate = max(at, changes), rate
            self._change = next(self._changes, None)
        self._owed += (now - at) * self._rate
        self._at = now
        size = int((self._owed + _ROUNDING_BYTES) // PACKET) * PACKET
        self._owed -= size
        full = now + (PACKET - self._owed) / self._rate if self._rate else math.inf
        change = math.inf if self._change is None else self._change[0]
        self.next = min(max(now + _TICK_SECONDS, full), change)
        return [size] if size else []


class TransferSchedule:
    def __init__(self, transfers: Iterator[Transfer], epoch: float, dilation: float) -> None:
        """`epoch`: the run's start. `dilation`: host seconds per second of device time."""
        self._transfers = ((epoch + at * dilation, round(size)) for at, size in transfers)
        self.next, self._size = next(self._transfers, (math.inf, 0))
        """`next`: when the next transfer begins; infinite if there is none."""

    def take(self, now: float) -> Sequence[int]:
        """Bytes of the transfers that have to begin now."""
        found = []
        while self.next <= now:
            if self.next > now - _MAX_LATE_SECONDS:
                found.append(self._size)
            self.next, self._size = next(self._transfers, (math.inf, 0))
        return found


def schedule(
    traffic: Background, seed: int, segment: str, *, epoch: float, dilation: float, now: float
) -> RateSchedule | TransferSchedule:
    """`seed`: of the run. `epoch`: its start. `dilation`: host seconds per second of device time."""
    if background.is_flows(traffic):
        return TransferSchedule(background.transfers(traffic, seed, segment), epoch, dilation)
    return RateSchedule(background.rates(traffic, seed, segment), epoch, dilation, now)
