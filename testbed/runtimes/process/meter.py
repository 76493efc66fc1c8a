"""Measures what the processes of a run use: CPU, memory, their links, and which are suspended."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Sequence, Set

import psutil

from agents.device.resource_usage import is_stopped, schedstat
from agents.wire.messages import LinkProbe, Telemetry, UsageSample
from testbed.host.forkserver import ForkedProgram
from testbed.relay.traffic import Traffic
from testbed.runtimes import SERVERS, Meter
from testbed.runtimes.process.duty_cycle import DutyCycle, cpu_clock


class Children(dict[str, psutil.Popen | ForkedProgram]):
    """The processes of a run, by component; of one that was started again the latest."""

    def is_alive(self, component: str) -> bool:
        return component in self and self[component].poll() is None


class ProcessMeter(Meter):
    def __init__(
        self, devices: Collection[str], children: Children, paused: Set[str], duty_cycle: DutyCycle
    ) -> None:
        """`paused` are the devices that are suspended by an action. The runtime changes all of these."""
        self._devices = devices
        self._children = children
        self._paused = paused
        self._duty_cycle = duty_cycle
        self._used: dict[tuple[str, int], float] = {}
        """CPU seconds of each device's processes, by id, when last looked at."""
        self.probes: Sequence[LinkProbe] = ()
        """Measurements of links that have not been reported yet."""
        self.traffic: Traffic | None = None
        """The relay's counters, if there is one."""

    def telemetry(self) -> list[Telemetry]:
        """A sample of each living device, named as the device init's: seconds and bytes. Bytes
        sent and received continue over a restart; without a relay they are not counted."""
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

    def stopped(self) -> set[str]:
        """Devices that are suspended to keep their shares, or paused, are none of them."""
        return {
            name
            for name in filter(self._children.is_alive, (*SERVERS, *self._devices))
            if name not in self._paused
            and not self._duty_cycle.suspends(name)
            and is_stopped(self._children[name].pid)
        }

    def server_pids(self) -> list[int]:
        return [self._children[component].pid for component in SERVERS if component in self._children]

    def device_cpu_seconds(self) -> float | None:
        """Clients that have ended have theirs in their last reading."""
        for name in filter(self._children.is_alive, self._devices):
            child = self._children[name]
            with contextlib.suppress(psutil.NoSuchProcess):
                self._used[name, child.pid] = cpu_clock(child)()
        return math.fsum(self._used.values())
