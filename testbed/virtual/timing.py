"""How long things take in virtual time: training, and transfers over the links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from agents import durations
from agents.config import Link
from testbed.plan import PlannedDevice

_FREE = Link()


@dataclass(frozen=True, slots=True)
class Work:
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
    """How long `device` trains; `rng` draws its `timing`."""

    def __init__(self, device: PlannedDevice, work: Work, rng: np.random.Generator) -> None:
        self._device = device
        self._work = work
        self._step = work.per_step(device)
        self._floor = None if device.timing is None else durations.sampler(device.timing, rng)

    def training_time(self, steps: int) -> float:
        """Seconds of the next training. `timing` is a floor under them: where nothing else is known, it
        is the time."""
        floor = 0.0 if self._floor is None else self._floor() / self._device.speed
        return max(steps * self._step, floor)

    def set_share(self, share: float) -> float:
        """Give the device another CPU share; by what factor a step takes longer from now on."""
        before = self._step
        self._device = replace(self._device, cpu=share)
        self._step = self._work.per_step(self._device)
        return self._step / before if before else 1.0


@dataclass(slots=True)
class Pipe:
    """One direction of a link. Transfers go through one after the other, each at the whole rate."""

    rate: int | None
    """bit/s; None for no limit."""
    free: float = 0.0
    """When the last transfer is through."""

    def through(self, at: float, size: int) -> float:
        """When `size` bytes that come at time `at` are through."""
        if self.rate is None:
            return at
        self.free = max(at, self.free) + 8 * size / self.rate
        return self.free


@dataclass(slots=True)
class Line:
    """The way between the server and one device: the server's own pipes, shared by all, then the
    device's, and half a round trip each way."""

    server_up: Pipe
    server_down: Pipe
    delay: float = 0.0
    up: Pipe = field(default_factory=lambda: Pipe(None))
    down: Pipe = field(default_factory=lambda: Pipe(None))

    def change(self, changes: Mapping[str, float | None]) -> None:
        """Fields of `agents.config.Link`, for what is sent from now on."""
        for pipe, name in ((self.up, "up"), (self.down, "down")):
            if name in changes:
                rate = changes[name]
                pipe.rate = None if rate is None else int(rate)
        if "rtt" in changes:
            self.delay = (changes["rtt"] or 0.0) / 2

    def download(self, at: float, size: int) -> float:
        """When a model of `size` bytes, sent at time `at`, is there."""
        return self.down.through(self.server_up.through(at, size), size) + self.delay

    def upload(self, at: float, size: int) -> float:
        """When the server has all of an update of `size` bytes, sent at time `at`."""
        return self.server_down.through(self.up.through(at, size), size) + self.delay

    def request(self, at: float) -> float:
        """When a request of a few bytes, sent at time `at`, is there."""
        return max(at, self.down.free) + self.delay


@dataclass(slots=True)
class Network:
    """All links of a run."""

    server_link: Link | None = None
    _up: Pipe = field(init=False)
    _down: Pipe = field(init=False)

    def __post_init__(self) -> None:
        link = self.server_link or _FREE
        self._up, self._down = Pipe(link.up), Pipe(link.down)

    def line(self, device: PlannedDevice) -> Line:
        """A new device's line."""
        link = device.link or _FREE
        return Line(self._up, self._down, link.rtt / 2, Pipe(link.up), Pipe(link.down))
