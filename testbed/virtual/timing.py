"""How long things take in virtual time: a device's training, and the delay of a message. What a step and
a transfer cost is in `testbed.plan.costs`, the links themselves are in `testbed.virtual.network`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from agents.timing.nanoseconds import Nanoseconds, from_seconds
from testbed.plan import PlannedDevice
from testbed.plan.costs import RTO_MIN, StepCost

_RTO_MAX = 120.0
"""Longest retransmission time-out, in seconds."""


class Speed:
    """How fast `device` computes."""

    def __init__(self, device: PlannedDevice, cost: StepCost) -> None:
        self._device = device
        self._cost = cost
        self._step = cost.per_step(device)

    def computing(self, steps: int) -> Nanoseconds:
        """How long the device computes an update of `steps` steps, at the share of the CPU that it has
        now."""
        return from_seconds(steps * self._step + self._cost.per_update(self._device))

    def preparing(self) -> Nanoseconds:
        """How long it computes before a training what other clients get, at that share."""
        return from_seconds(self._cost.seconds_on(self._device, self._cost.exchange.prepare))

    def passing_on(self, messages: int) -> Nanoseconds:
        """How long it computes for so many messages that it sends to other clients or gets."""
        return from_seconds(self._cost.seconds_on(self._device, messages * self._cost.exchange.share))

    def answering(self) -> Nanoseconds:
        """How long it computes an answer to the server."""
        return from_seconds(self._cost.seconds_on(self._device, self._cost.exchange.answer))

    def starting(self) -> Nanoseconds:
        """How long a client that starts takes until it is ready."""
        return from_seconds(self._cost.per_start(self._device))

    def set_share(self, share: float) -> float:
        """Give the device another CPU share; by what factor a step takes longer from now on."""
        before = self._step
        self._device = replace(self._device, cpu=share)
        self._step = self._cost.per_step(self._device)
        return self._step / before if before else 1.0


def latency(rtt: float, jitter: float, loss: float, uniform: Callable[[], float]) -> float:
    """Seconds from when the last packet of a message leaves until it is there: half of `rtt` ± `jitter`,
    and, as no packet follows that would tell of its loss, a retransmission time-out each time that it is
    lost, twice as long each time (RFC 6298, with Linux's bounds). `uniform` draws from [0, 1); `loss` is
    below 1.
    """
    delay = rtt / 2
    if jitter:
        delay = max(0.0, delay + jitter * (2 * uniform() - 1))
    timeout = rtt + RTO_MIN
    while loss and uniform() < loss:
        delay += timeout
        timeout = min(2 * timeout, _RTO_MAX)
    return delay
