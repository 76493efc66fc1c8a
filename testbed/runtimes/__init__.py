"""Protocols of the runtimes, each of which has a package of its own."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from agents import events, features
from agents.config import BrokerAccess
from agents.device_actions import DeviceAction
from agents.mqtt.topics import AGGREGATOR, ROUTER
from agents.process import without_garbage_collection
from agents.wire.messages import AddressedOrder, Disturbance, Measurement
from testbed.broker import BROKER
from testbed.data.preparation import Prepared
from testbed.fidelity.host_load import HostSample
from testbed.plan.agent_configs import RunSpec
from testbed.rundir.directory import RunDirectory
from testbed.traits import traits
from testbed.view import View

SERVERS = (BROKER, AGGREGATOR, ROUTER)
"""Components that serve all devices. Without links there is no router."""


class Runtime(Protocol):
    """Starts, limits, changes and ends the processes of one run. All methods are called from one thread.

    Everything that a runtime starts is labelled with the run id, by which `testbed down` finds
    left-overs after any crash, from any directory.
    """

    @property
    def meter(self) -> Meter: ...

    def start(self) -> BrokerAccess:
        """Start broker, aggregator and all devices (in parallel). Return the controller's login at the
        broker.

        Devices start without a CPU limit, because start-up is not part of the experiment. Raises
        HostError.
        """

    def limit(self, device: str) -> None:
        """Apply the CPU quota, each time the device's client becomes ready. No effect on a device that
        has ended."""

    def measure_again(self, devices: Sequence[str]) -> list[AddressedOrder]:
        """Measure links before the run clock starts. Return the orders for devices that measure their
        own link, without a CPU limit until the next `limit`. Other measurements are in the meter's next
        telemetry. Raises HostError."""

    def begin(self) -> None:
        """Called immediately before the run clock starts, when all expected clients, or a quorum, are
        ready and limited."""

    def act(self, device: str, action: DeviceAction) -> list[AddressedOrder]:
        """Carry out the runtime's part of an action. Return orders for the processes that do the rest.

        An action without effect, such as a pause of a paused device, is no error. Raises BadInputError
        if this run cannot carry out the action. Raises HostError.
        """

    def exit_codes(self) -> dict[str, int]:
        """Components that have ended: `aggregator`, `broker`, `router`, or the name of a device."""

    def restart(self, component: str) -> int | None:
        """Restart broker or aggregator. Return the port on 127.0.0.1 at which the controller reaches the
        broker; None if it is unchanged. Raises HostError."""

    def stop(self) -> None:
        """Remove everything of this run, and save logs to its directory. Idempotent."""


@dataclass(frozen=True, slots=True)
class HostReading:
    """Measurements on another host with devices."""

    clock_uncertainty: float
    """Maximum error of that host's times after their conversion to this host's clock, in seconds."""
    load: HostSample | None
    """Since the previous reading; None if unknown, as in the first."""


class Meter(Protocol):
    """Measures what a run uses, without changing anything. Called from the runtime's thread."""

    def telemetry(self) -> Sequence[Measurement]:
        """One per device, about once a second; empty if devices send their telemetry themselves."""
        return ()

    def obey(self, order: features.InitOrder) -> list[AddressedOrder]:
        """Begin to measure as a feature orders, or return the orders to the inits that do."""
        return [(order.device, order)]

    def feature_telemetry(self) -> Sequence[features.Telemetry]:
        """Messages of devices' features that are due, several times per second; empty if devices send
        them themselves."""
        return ()

    def disturbances(self) -> Sequence[Disturbance]:
        """Noticed since the last call, such as a real device that was out of contact."""
        return ()

    def externally_stopped(self) -> set[str]:
        """Components that somebody outside the testbed has stopped (by a signal or `docker pause`), if
        this host can see them."""

    def groups(self) -> Collection[str]:
        """Names in the paths of all control groups of the run's processes on this host."""
        return ()

    def server_pids(self) -> list[int]:
        """Broker, aggregator and router, if this host can see them."""

    def device_cpu_seconds(self) -> float | None:
        """Total of the devices on this host; None if it cannot be read."""

    def other_hosts(self, at: float, used: Mapping[str, float]) -> Mapping[str, HostReading]:
        """Return a reading of each other host that has devices, by host name. `at` is the run time in
        seconds. `used` has the CPU seconds that each device has used so far."""
        return {}


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run with processes or containers on this host, perhaps left over."""

    run: str
    runtime: str | None
    """None if only the controller is alive."""
    components: int
    """Number of containers or processes, without the controller."""
    directory: Path | None
    """None if no label names it."""

    @classmethod
    def from_labels(
        cls, run: str, runtime: str | None, components: int, directory: str | None
    ) -> LiveRun:
        """A `directory` that is not an absolute path is ignored, because anyone may write that label."""
        path = Path(directory or "")
        return cls(run, runtime, components, path if path.is_absolute() else None)


class Emulator(Protocol):
    def is_available(self) -> bool: ...

    def check_host(self) -> None:
        """Requirements that a plan does not state, such as a Docker engine, before the run has a
        directory. Raises HostError that names the one that is not met."""

    def launcher(self, spec: RunSpec, view: View) -> AbstractContextManager[Runtime]:
        """Start the runtime on entry, stop it on exit. On entry, also make what runs share, such as
        images, and write entries to the manifest. Raises HostError."""

    def live_runs(self) -> list[LiveRun]:
        """Empty if the runtime is not available."""

    def take_down(self, run: str, directory: RunDirectory | None) -> bool:
        """Remove left-overs; save logs to `directory`. Return False if the runtime is not available.
        Raises HostError if something may be left."""

    def logs(self, run: str, tail: int) -> dict[str, list[str]]:
        """Last `tail` lines of each component's log that is not in the run directory already."""


class Simulator(Protocol):
    def run(self, spec: RunSpec, prepared: Prepared, view: View) -> events.RunEnded: ...


def emulator(name: str) -> Emulator:
    """Raises BadInputError for an unknown name."""
    return cast(Emulator, importlib.import_module(traits(name).module))


def simulator(name: str) -> Simulator:
    """Raises BadInputError for an unknown name."""
    with without_garbage_collection():  # faster while PyTorch is imported
        return cast(Simulator, importlib.import_module(traits(name).module))
