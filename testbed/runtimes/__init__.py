"""Protocols that the runtimes implement. Each runtime has a package of its own."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from agents import events
from agents.config import BrokerAccess
from agents.device_actions import DeviceAction
from agents.imports import without_garbage_collection
from agents.mqtt.topics import AGGREGATOR, ROUTER
from agents.wire.messages import (
    AddressedOrder,
    Disturbance,
    EnergySample,
    EnergyStart,
    GpuSample,
    PowerSwitch,
    Telemetry,
)
from testbed.broker import BROKER
from testbed.data.preparation import Prepared
from testbed.fidelity.host_load import HostSample
from testbed.plan.agent_configs import RunSpec
from testbed.rundir.directory import RunDirectory
from testbed.traits import traits
from testbed.view import View

SERVERS = (BROKER, AGGREGATOR, ROUTER)
"""Components of a run that serve all devices. A run without links has no router."""


class Runtime(Protocol):
    """Starts, limits, changes and ends the processes of one run. All methods are called from one thread.

    A runtime labels everything that it starts with the run id. `testbed down` uses these labels to find
    left-over processes and containers after any crash, from any directory.
    """

    @property
    def meter(self) -> Meter:
        """Meter of the resources of the hosts that the run uses."""

    def start(self) -> BrokerAccess:
        """Start broker, aggregator and all devices (in parallel). Return the controller's login at the
        broker.

        Devices start without a CPU limit, because start-up is not part of the experiment. Raises
        HostError if this host cannot start them.
        """

    def limit(self, device: str) -> None:
        """Apply the CPU quota of `device`. The controller calls this method each time the device's
        client becomes ready. For a device that has ended, the call has no effect."""

    def measure_again(self, devices: Sequence[str]) -> list[AddressedOrder]:
        """Measure the links of `devices` again, before the run clock starts. Return the orders for the
        devices that measure their own link. Their CPU is then without a limit until the next call of
        `limit`. The other measurements are in the meter's next telemetry. Raises HostError."""

    def begin(self) -> None:
        """Prepare for the start of the run clock. Called immediately before the clock starts. At that
        time, all expected clients, or a quorum of them, are ready and have their CPU limits."""

    def act(self, device: str, action: DeviceAction) -> list[AddressedOrder]:
        """Carry out the runtime's part of an action on a device. Return the orders for the processes
        that do the rest.

        An action without effect, such as a pause of a paused device, is no error. Raises BadInputError
        if this run cannot carry out the action. Raises HostError.
        """

    def start_energy(self, order: EnergyStart) -> list[AddressedOrder]:
        """Begin to count the energy of a device. Return the orders for the processes that count it."""

    def exit_codes(self) -> dict[str, int]:
        """Exit codes of the components that have ended, by component: `aggregator`, `broker`, `router`,
        or the name of a device."""

    def restart(self, component: str) -> int | None:
        """Restart the broker or the aggregator after it has ended.

        Returns the port on 127.0.0.1 at which the controller reaches the broker; None if the port is
        unchanged. Raises HostError.
        """

    def stop(self) -> None:
        """End and remove everything of this run, and save logs to the run directory. Idempotent."""


@dataclass(frozen=True, slots=True)
class HostReading:
    """Measurements on another host that has devices of the run."""

    clock_uncertainty: float
    """Maximum error of the other host's times after their conversion to this host's clock, in
    seconds."""
    load: HostSample | None
    """Load since the previous reading; None if the load is unknown, as in the first reading."""


class Meter(Protocol):
    """Measures the resources that a run uses, without changing anything. All methods are called from the
    runtime's thread."""

    def telemetry(self) -> Sequence[Telemetry | GpuSample]:
        """One sample per device; empty if the devices send their telemetry themselves. Called about once
        a second."""
        return ()

    def energy(self) -> Sequence[EnergySample | PowerSwitch]:
        """Energy samples that are due, and the devices that power off or return now; empty if the
        devices send these messages themselves. Called several times per second."""
        return ()

    def disturbances(self) -> Sequence[Disturbance]:
        """Disturbances that the runtime has noticed since the last call, such as a real device that was
        out of contact."""
        return ()

    def externally_stopped(self) -> set[str]:
        """Components that somebody outside the testbed has stopped (by a signal or `docker pause`).
        Components that this host cannot see are left out."""

    def groups(self) -> Collection[str]:
        """Names that are in the paths of all control groups of the run's processes on this host."""
        return ()

    def server_pids(self) -> list[int]:
        """Process ids of broker, aggregator and router. Processes that this host cannot see are left
        out."""

    def device_cpu_seconds(self) -> float | None:
        """Total CPU seconds that the devices on this host have used; None if the CPU time cannot be
        read."""

    def other_hosts(self, at: float, used: Mapping[str, float]) -> Mapping[str, HostReading]:
        """Return a reading of each other host that has devices, by host name. `at` is the run time in
        seconds. `used` has the CPU seconds that each device has used so far."""
        return {}


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run with running or left-over processes or containers on this host."""

    run: str
    runtime: str | None
    """Name of the runtime; None if only the controller is alive."""
    components: int
    """Number of running containers or processes, without the controller."""
    directory: Path | None
    """Run directory; None if no label names it."""

    @classmethod
    def from_labels(
        cls, run: str, runtime: str | None, components: int, directory: str | None
    ) -> LiveRun:
        """Make a live run from labels. Ignore the label `directory` if it is not an absolute path,
        because anyone may write that label."""
        path = Path(directory or "")
        return cls(run, runtime, components, path if path.is_absolute() else None)


class Emulator(Protocol):
    """Functions that the module of a real-time runtime provides."""

    def is_available(self) -> bool:
        """Whether the runtime can be used on this host."""

    def check_host(self) -> None:
        """Check the requirements that a plan does not state, such as a Docker engine on this host.
        Called before the run has a directory. Raises HostError with the requirement that is not met."""

    def launcher(self, spec: RunSpec, view: View) -> AbstractContextManager[Runtime]:
        """Return a context manager that starts the runtime of one run on entry, and stops it on exit. On
        entry, it also makes the objects that runs share, such as images, and writes entries to the
        manifest. Raises HostError."""

    def live_runs(self) -> list[LiveRun]:
        """All runs with running or left-over processes or containers; empty if the runtime is not
        available."""

    def take_down(self, run: str, directory: RunDirectory | None) -> bool:
        """Remove the left-over processes and containers of `run`. Save the run's logs to `directory`;
        None to save no logs.

        Returns False if the runtime is not available. Raises HostError if a process or container may be
        left.
        """

    def logs(self, run: str, tail: int) -> dict[str, list[str]]:
        """Last `tail` lines of the logs of the live `run`, by component. Logs that are already in the
        run directory are left out."""


class Simulator(Protocol):
    """Function that the module of a simulated runtime provides."""

    def run(self, spec: RunSpec, prepared: Prepared, view: View) -> events.RunEnded:
        """Execute the whole run in this process."""


def emulator(name: str) -> Emulator:
    """Return the module of the real-time runtime `name`. Raises BadInputError if no such runtime
    exists."""
    return cast(Emulator, importlib.import_module(traits(name).module))


def simulator(name: str) -> Simulator:
    """Return the module of the simulated runtime `name`. Raises BadInputError if no such runtime
    exists."""
    with without_garbage_collection():  # faster while PyTorch is imported
        return cast(Simulator, importlib.import_module(traits(name).module))
