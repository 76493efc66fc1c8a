"""Time in virtual time: its clock and event queue, and the durations of computations and messages."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import replace

from agents.timing.nanoseconds import Nanoseconds, from_seconds
from testbed.plan import PlannedDevice
from testbed.plan.costs import RTO_MIN, StepCost

SCENARIO, LINK, DEVICE, ARRIVAL = range(4)
"""Ranks of callbacks; at one time, a lower rank comes first."""


class EventQueue:
    """Ordered by time, rank, device, and order of planning."""

    def __init__(self) -> None:
        self.now: Nanoseconds = 0
        self._heap: list[tuple[Nanoseconds, int, int, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def plan(self, time: Nanoseconds, rank: int, index: int, callback: Callable[[], None]) -> None:
        """A past time means now. `index`: position in device order."""
        heapq.heappush(self._heap, (max(self.now, time), rank, index, next(self._count), callback))

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> Nanoseconds | None:
        return self._heap[0][0] if self._heap else None

    def pop_due(self) -> Callable[[], None] | None:
        if self._heap and self._heap[0][0] <= self.now:
            return heapq.heappop(self._heap)[-1]
        return None

    def clear(self) -> None:
        self._heap.clear()


_RTO_MAX = 120.0
"""Maximum retransmission timeout in seconds."""


class ComputeTimes:
    """Nanoseconds at the device's present CPU share."""

    def __init__(self, device: PlannedDevice, cost: StepCost) -> None:
        self._device = device
        self._cost = cost
        self._step = cost.per_step(device)

    def computing(self, work: float) -> Nanoseconds:
        """An update. `work`: steps of a full mini-batch."""
        return from_seconds(work * self._step + self._cost.per_update(self._device))

    def preparing(self) -> Nanoseconds:
        """To compute the data for other clients before a training, such as a mask and its shares."""
        return from_seconds(self._cost.seconds_on(self._device, self._cost.exchange.prepare))

    def passing_on(self, messages: int) -> Nanoseconds:
        """`messages`: to or from other clients."""
        return from_seconds(self._cost.seconds_on(self._device, messages * self._cost.exchange.share))

    def answering(self) -> Nanoseconds:
        """An answer to the server."""
        return from_seconds(self._cost.seconds_on(self._device, self._cost.exchange.answer))

    def starting(self) -> Nanoseconds:
        """From the start of a client until it is ready."""
        return from_seconds(self._cost.per_start(self._device))

    def set_share(self, share: float) -> float:
        """Return the factor by which a step takes longer from now on."""
        before = self._step
        self._device = replace(self._device, cpu=share)
        self._step = self._cost.per_step(self._device)
        return self._step / before if before else 1.0


def latency(rtt: float, jitter: float, loss: float, uniform: Callable[[], float]) -> float:
    """Return the seconds from the departure of a message's last packet to its arrival: half of `rtt` ±
    `jitter`.

    Each time that the packet is lost, a retransmission timeout is added, because no later packet reveals
    the loss. The timeout doubles with each loss (RFC 6298, with Linux's bounds).

    `rtt` and `jitter` are in seconds. `loss` is a fraction below 1. `uniform` draws from [0, 1).
    """
    delay = rtt / 2
    if jitter:
        delay = max(0.0, delay + jitter * (2 * uniform() - 1))
    timeout = rtt + RTO_MIN
    while loss and uniform() < loss:
        delay += timeout
        timeout = min(2 * timeout, _RTO_MAX)
    return delay
