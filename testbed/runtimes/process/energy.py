"""Energy of devices that are processes of this host, which have no init to count it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

import psutil

from agents.device.energy_meter import CounterReading, EnergyMeter
from agents.device_actions import EnergyAction
from agents.timing.nanoseconds import SECOND, Nanoseconds, from_seconds
from agents.wire.messages import EnergySample, EnergyStart, PowerSwitch
from testbed.plan import PlannedDevice
from testbed.relay.traffic import Traffic
from testbed.runtimes.process.duty_cycle import Children, cpu_clock

_BEFORE_START: Nanoseconds = SECOND // 10
"""Nanoseconds between two readings of a device before the run clock is known to run."""


class FleetEnergyMeter:
    """Devices whose energy is not counted are left out. `absent`: they join during the run."""

    def __init__(
        self, devices: Iterable[PlannedDevice], children: Children, absent: frozenset[str]
    ) -> None:
        self._children = children
        self._meters: dict[str, EnergyMeter] = {}
        self._sample_every: dict[str, Nanoseconds] = {}
        """Host's clock, between two samples."""
        for device in devices:
            if device.energy is not None:
                name, dilation, is_present = device.name, device.dilation, device.name not in absent
                meter = EnergyMeter(name, device.energy, device.cpu, dilation, is_present=is_present)
                self._meters[name], self._sample_every[name] = meter, from_seconds(dilation)
        self._read_due: dict[str, float] = dict.fromkeys(self._meters, 0)
        self._sample_due: dict[str, Nanoseconds] = dict.fromkeys(self._meters, 0)
        self._ready: dict[str, int] = {}
        """Process of each device's client that has become ready last."""
        self._was_starting: set[str] = set()
        """Devices whose client was starting at the last reading."""
        self._cpu: dict[str, Nanoseconds] = {}
        """CPU time at the last reading of each device."""
        self.traffic: Traffic | None = None
        """The relay's counters; None if the run has no relay."""

    def start(self, order: EnergyStart) -> None:
        self._meters[order.device].start(order)
        self._read_due[order.device] = 0

    def ready(self, device: str) -> None:
        """Report that the client of `device` is ready: from now on its CPU is limited."""
        if device in self._meters and device in self._children:
            self._ready[device] = self._children[device].pid

    def act(self, device: str, action: EnergyAction) -> None:
        if device in self._meters:
            self._read(device)
            self._meters[device].account.act(action)
            self._read_due[device] = 0

    def set_counted(self, device: str, *, is_counted: bool) -> None:
        """Count the device's energy from now on, or not."""
        if device in self._meters:
            self._read(device)
            self._meters[device].account.is_counted = is_counted
            self._read_due[device] = 0

    def loses_memory(self, device: str) -> bool:
        """A power-off erases the client's files."""
        return device in self._meters and self._meters[device].account.loses_memory

    def look(self) -> Iterator[EnergySample | PowerSwitch]:
        """Read the meters that are due. Yield the samples that are due, and the devices that power off
        or return now."""
        now = time.monotonic_ns()
        for name, meter in self._meters.items():
            if now < self._read_due[name]:
                continue
            self._read(name)
            if (powered := meter.switch()) is not None:
                yield self._sample(name)
                level = meter.account.level or 0.0
                yield PowerSwitch(name, time.monotonic(), powered=powered, level=level)
            elif meter.is_counting and now >= self._sample_due[name]:
                yield self._sample(name)
            if meter.is_counting:
                self._read_due[name] = min(meter.next_look(now), self._sample_due[name])
            else:
                self._read_due[name] = now + _BEFORE_START

    def _sample(self, device: str) -> EnergySample:
        self._sample_due[device] = time.monotonic_ns() + self._sample_every[device]
        return self._meters[device].sample(time.monotonic())

    def _read(self, device: str) -> None:
        is_starting = False
        if self._children.is_alive(device):
            child = self._children[device]
            is_starting = self._ready.get(device) != child.pid
            with contextlib.suppress(psutil.NoSuchProcess):
                self._cpu[device] = from_seconds(cpu_clock(child)())
        was_starting = device in self._was_starting
        (self._was_starting.add if is_starting else self._was_starting.discard)(device)
        passed = {} if self.traffic is None else self.traffic.telemetry_fields(device)
        reading = CounterReading(
            time.monotonic_ns(),
            self._cpu.get(device, 0),
            passed.get("sent", 0),
            passed.get("received", 0),
        )
        self._meters[device].update(reading, is_starting=is_starting or was_starting)
