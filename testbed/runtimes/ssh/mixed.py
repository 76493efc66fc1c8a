"""Runs with real devices: each verb goes to the emulating runtime, or to the real devices."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

from agents import features
from agents.config import BrokerAccess
from agents.device_actions import DeviceAction
from agents.wire.messages import AddressedOrder, Disturbance, Measurement
from testbed.plan.agent_configs import RunSpec
from testbed.runtimes import HostReading, Meter, Runtime, emulator
from testbed.runtimes.ssh.hosts import RealHosts
from testbed.view import View


@contextlib.contextmanager
def launcher(spec: RunSpec, view: View) -> Iterator[Runtime]:
    """The plan's emulating runtime, with the real devices of the plan."""
    with emulator(spec.plan.runtime).launcher(spec, view) as emulating:
        mixed = MixedRuntime(emulating, RealHosts(spec, view))
        try:
            yield mixed
        finally:
            mixed.close()


class MixedRuntime(Runtime):
    def __init__(self, emulating: Runtime, real: RealHosts) -> None:
        self._emulating, self._real = emulating, real
        self._meter = MixedMeter(emulating.meter, real)

    @property
    def meter(self) -> Meter:
        return self._meter

    def start(self) -> BrokerAccess:
        """Real devices are prepared first, which may take long, and started last, because they need the
        broker."""
        self._real.prepare()
        access = self._emulating.start()
        self._real.start()
        return access

    def limit(self, device: str) -> None:
        if device not in self._real.names:
            self._emulating.limit(device)

    def measure_again(self, devices: Sequence[str]) -> list[AddressedOrder]:
        real = self._real.names.intersection(devices)
        self._real.measure_again(sorted(real))
        return self._emulating.measure_again([one for one in devices if one not in real])

    def begin(self) -> None:
        self._emulating.begin()

    def act(self, device: str, action: DeviceAction) -> list[AddressedOrder]:
        owner = self._real if device in self._real.names else self._emulating
        return owner.act(device, action)

    def exit_codes(self) -> dict[str, int]:
        return self._emulating.exit_codes() | self._real.exit_codes()

    def restart(self, component: str) -> int | None:
        return self._emulating.restart(component)

    def stop(self) -> None:
        """Remove everything. What the real devices may keep is reported when all else is removed."""
        try:
            self._real.stop()
        finally:
            self._emulating.stop()

    def close(self) -> None:
        self._real.close()


class MixedMeter(Meter):
    """Real devices send their telemetry themselves."""

    def __init__(self, emulating: Meter, real: RealHosts) -> None:
        self._emulating, self._real = emulating, real

    def telemetry(self) -> Sequence[Measurement]:
        return [*self._emulating.telemetry(), *self._real.probes()]

    def obey(self, order: features.InitOrder) -> list[AddressedOrder]:
        return super().obey(order) if order.device in self._real.names else self._emulating.obey(order)

    def feature_telemetry(self) -> Sequence[features.Telemetry]:
        return self._emulating.feature_telemetry()

    def disturbances(self) -> Sequence[Disturbance]:
        return [*self._emulating.disturbances(), *self._real.disturbances()]

    def externally_stopped(self) -> set[str]:
        return self._emulating.externally_stopped()

    def groups(self) -> Collection[str]:
        return self._emulating.groups()

    def server_pids(self) -> list[int]:
        return self._emulating.server_pids()

    def device_cpu_seconds(self) -> float | None:
        return self._emulating.device_cpu_seconds()

    def other_hosts(self, at: float, used: Mapping[str, float]) -> Mapping[str, HostReading]:
        return {**self._emulating.other_hosts(at, used), **self._real.readings(at)}
