"""Meter of a run's processes: their CPU time, memory and traffic, and which processes are stopped."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Sequence, Set

import psutil

from agents import features
from agents.device.control_group import is_stopped, schedstat
from agents.wire.messages import AddressedOrder, LinkProbe, NetworkProbe, Telemetry, UsageSample
from testbed.relay.sockets import Traffic
from testbed.runtimes import SERVERS, Meter
from testbed.runtimes.process.device_features import DeviceFeatures
from testbed.runtimes.process.duty_cycle import Children, DutyCycle, cpu_clock


class ProcessMeter(Meter):
    def __init__(
        self,
        devices: Collection[str],
        children: Children,
        paused: Set[str],
        duty_cycle: DutyCycle,
        device_features: DeviceFeatures,
    ) -> None:
        """`paused`: suspended by an action. The runtime changes `children` and `paused` during the
        run."""
        self._devices = devices
        self._children = children
        self._paused = paused
        self._duty_cycle = duty_cycle
        self._features = device_features
        self._used: dict[tuple[str, int], float] = {}
        """CPU seconds of each process when last read, by device and process id."""
        self.probes: Sequence[LinkProbe | NetworkProbe] = ()
        """Measurements for the next telemetry."""
        self.traffic: Traffic | None = None
        """The relay's counters; None if the run has no relay."""

    def telemetry(self) -> list[Telemetry]:
        """One of each living device, with the fields of a device's init (seconds, bytes).

        Bytes sent and received continue after a restart; they are missing without a relay. Each
        measurement in `probes` is returned once.
        """
        samples: list[Telemetry] = list(self.probes)
        self.probes = ()
        for name in filter(self._children.is_alive, self._devices):
            with contextlib.suppress(psutil.NoSuchProcess):
                memory = self._children[name].memory_info().rss
                cpu = cpu_clock(self._children[name])()
                passed = {} if self.traffic is None else self.traffic.telemetry_fields(name)
                demand = schedstat(self._children[name].pid)
                if demand:
                    demand["waited"] += self._duty_cycle.suspended_s(name)
                at = time.monotonic()
                samples.append(
                    UsageSample(device=name, at=at, cpu=cpu, memory=memory, **passed, **demand)
                )
        return samples

    def obey(self, order: features.InitOrder) -> list[AddressedOrder]:
        self._features.obey(order)
        return []

    def feature_telemetry(self) -> list[features.Telemetry]:
        return list(self._features.messages())

    def externally_stopped(self) -> set[str]:
        """Components that are stopped, except devices that the duty cycle or an action has suspended."""
        return {
            name
            for name in filter(self._children.is_alive, (*SERVERS, *self._devices))
            if name not in self._paused
            and not self._duty_cycle.is_suspended(name)
            and is_stopped(self._children[name].pid)
        }

    def server_pids(self) -> list[int]:
        return [self._children[component].pid for component in SERVERS if component in self._children]

    def device_cpu_seconds(self) -> float | None:
        """Total of all devices. For a process that has ended, its last reading counts."""
        for name in filter(self._children.is_alive, self._devices):
            child = self._children[name]
            with contextlib.suppress(psutil.NoSuchProcess):
                self._used[name, child.pid] = cpu_clock(child)()
        return math.fsum(self._used.values())
