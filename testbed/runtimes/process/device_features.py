"""Features of devices that are processes of this host: the controller's process plays their init."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from agents import features
from agents.device.features import make_halves
from agents.device.part import ClientHost, CounterReading, InitHalf
from agents.fields import FeatureAction
from agents.timing.nanoseconds import Nanoseconds, from_seconds
from testbed.plan import PlannedDevice
from testbed.plan.agent_configs import feature_settings
from testbed.relay.sockets import Traffic
from testbed.runtimes.process.duty_cycle import Children, cpu_clock


class PowerOffs(Protocol):
    def __call__(self, device: str, *, loses_memory: bool) -> None:
        """End the client of a device without power."""


class DeviceFeatures:
    """Devices without features are left out. `absent`: they join during the run."""

    def __init__(
        self,
        devices: Iterable[PlannedDevice],
        children: Children,
        absent: frozenset[str],
        power_off: PowerOffs,
    ) -> None:
        self._children = children
        self._devices: dict[str, _Featured] = {}
        for device in devices:
            settings = feature_settings(device, present=device.name not in absent)
            host = _ProcessHost(device.name, children, power_off)
            if halves := make_halves(settings, host):
                self._devices[device.name] = _Featured(host, halves, device.dilation)

    def obey(self, order: features.InitOrder) -> None:
        for half in self._change(order.device):
            half.obey(order)

    def ready(self, device: str) -> None:
        """Report that the client of `device` is ready: from now on its CPU is limited."""
        if device in self._devices and device in self._children:
            self._devices[device].host.ready = self._children[device].pid

    def act(self, device: str, action: FeatureAction) -> None:
        for half in self._change(device):
            half.act(action)

    def set_present(self, device: str, *, is_present: bool) -> None:
        for half in self._change(device):
            half.set_present(is_present=is_present)

    def watch_traffic(self, traffic: Traffic) -> None:
        """`traffic`: the relay's counters."""
        for one in self._devices.values():
            one.host.traffic = traffic

    def messages(self) -> Iterator[features.Telemetry]:
        """Look at the devices that are due. Yield what their features publish."""
        now = time.monotonic()
        for one in self._devices.values():
            if now >= min(one.look_due, one.sample_due):
                one.look_due = now + min(half.look() for half in one.halves)
            if now >= one.sample_due:
                one.sample_due = now + one.sample_every
                for half in one.halves:
                    half.sample()
            yield from one.host.published
            one.host.published.clear()

    def _change(self, device: str) -> list[InitHalf]:
        """The device is looked at again soon, because its features change."""
        if device not in self._devices:
            return []
        self._devices[device].look_due = -math.inf
        return self._devices[device].halves


@dataclass(slots=True)
class _Featured:
    host: _ProcessHost
    halves: list[InitHalf]
    sample_every: float
    """Host seconds between two samples."""
    look_due: float = -math.inf
    sample_due: float = -math.inf


@dataclass(slots=True)
class _ProcessHost(ClientHost):
    device: str
    children: Children
    end_client: PowerOffs
    published: list[features.Telemetry] = field(default_factory=list)
    traffic: Traffic | None = None
    """None if the run has no relay."""
    ready: int | None = None
    """Process of the client that has become ready last."""
    cpu: Nanoseconds = 0
    """CPU time of the client at the last reading."""

    def counters(self) -> CounterReading:
        if self.children.is_alive(self.device):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.cpu = from_seconds(cpu_clock(self.children[self.device])())
        passed = {} if self.traffic is None else self.traffic.telemetry_fields(self.device)
        sent, received = passed.get("sent", 0), passed.get("received", 0)
        return CounterReading(time.monotonic_ns(), self.cpu, sent, received)

    def now(self) -> float:
        return time.monotonic()

    @property
    def is_starting(self) -> bool:
        is_alive = self.children.is_alive(self.device)
        return is_alive and self.ready != self.children[self.device].pid

    def publish(self, message: features.Telemetry, *, is_lossy: bool = False) -> None:
        self.published.append(message)

    def power_off(self, *, loses_memory: bool) -> None:
        self.end_client(self.device, loses_memory=loses_memory)
