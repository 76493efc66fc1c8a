"""How long things take in virtual time: training, and what TCP makes of a link. The links themselves are
in `testbed.virtual.network`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from agents import durations
from agents.nanoseconds import Nanoseconds, from_seconds
from testbed.plan import PlannedDevice

_MSS = 1448
"""Payload of a full packet in bytes: Ethernet, IPv4, TCP with time stamps."""
_RTO_MIN, _RTO_MAX = 0.2, 120.0
"""Seconds: of a retransmission time-out what Linux adds to the round trip at least; and its longest."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one mini-batch step costs."""

    flops: float | None = None
    """Floating-point operations, for devices whose `gflops` are given."""
    seconds: float | None = None
    """On one whole core of this host, for devices with a `cpu` share."""

    def per_step(self, device: PlannedDevice) -> float:
        """Seconds that a step takes on `device`; 0 where only its `timing` is known."""
        if device.gflops is not None and self.flops is not None:
            return self.flops / (device.gflops * device.speed * 1e9)
        if device.cpu is not None and self.seconds is not None:
            return self.seconds / device.cpu
        return 0.0


class Speed:
    """How fast `device` trains; `rng` draws its `timing`."""

    def __init__(self, device: PlannedDevice, cost: StepCost, rng: np.random.Generator) -> None:
        self._device = device
        self._cost = cost
        self._step = cost.per_step(device)
        self._floor = None if device.timing is None else durations.sampler(device.timing, rng)

    def computing(self, steps: int) -> Nanoseconds:
        """How long the device computes `steps` steps, at the share of the CPU that it has now."""
        return from_seconds(steps * self._step)

    def floor(self) -> Nanoseconds:
        """How long the next training takes at least, whatever the share: `timing`. Where nothing else is
        known, it is the time."""
        return 0 if self._floor is None else from_seconds(self._floor() / self._device.speed)

    def set_share(self, share: float) -> float:
        """Give the device another CPU share; by what factor a step takes longer from now on."""
        before = self._step
        self._device = replace(self._device, cpu=share)
        self._step = self._cost.per_step(self._device)
        return self._step / before if before else 1.0


def goodput(rate: float | None, rtt: float, loss: float) -> float | None:
    """What a TCP connection makes of a link of `rate` bit/s (None for no limit) and `rtt` seconds that
    loses the share `loss` of the packets: bit/s, None for no limit.

    It sends at most as fast as its loss recovery lets it (Padhye, Firoiu, Towsley, Kurose 1998, eq. 30:
    Mathis et al. 1997 and time-outs), with CUBIC's mean window W in packets (RFC 9438, section 5), which
    for a short round trip or many losses is Reno's, the first one:

        MSS / (RTT/W + RTO min(1, 3√(3p/8)) p (1 + 32p²)),   W = max(√(3/2p), 1.054 (RTT/p)^¾)

    and what was lost is sent again. Assumes independent losses, and transfers long enough to have left
    slow start. BBR, which does not take a loss for congestion, is faster.
    """
    if not loss:
        return rate
    window = max(math.sqrt(1.5 / loss), 1.054 * math.pow(rtt / loss, 0.75))
    timeouts = min(1.0, 3 * math.sqrt(3 * loss / 8)) * loss * (1 + 32 * loss**2)
    bound = 8 * _MSS / (rtt / window + (rtt + _RTO_MIN) * timeouts)
    return (1 - loss) * (bound if rate is None else min(bound, rate))


def latency(rtt: float, jitter: float, loss: float, uniform: Callable[[], float]) -> float:
    """Seconds from when the last packet of a message leaves until it is there: half of `rtt` ± `jitter`,
    and, as no packet follows that would tell of its loss, a retransmission time-out each time that it is
    lost, twice as long each time (RFC 6298, with Linux's bounds). `uniform` draws from [0, 1); `loss` is
    below 1.
    """
    delay = rtt / 2
    if jitter:
        delay = max(0.0, delay + jitter * (2 * uniform() - 1))
    timeout = rtt + _RTO_MIN
    while loss and uniform() < loss:
        delay += timeout
        timeout = min(2 * timeout, _RTO_MAX)
    return delay
