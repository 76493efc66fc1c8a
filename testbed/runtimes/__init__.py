"""Protocols that the runtimes implement; each runtime has a package of its own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from agents import events
from agents.config import BrokerAccess
from agents.device_actions import Action
from agents.imports import without_garbage_collection
from agents.mqtt.topics import AGGREGATOR, ROUTER
from agents.wire.messages import AddressedOrder, GpuSample, Telemetry
from testbed.broker import BROKER
from testbed.data.preparation import Prepared
from testbed.fidelity.host_load import HostSample
from testbed.plan.agent_configs import RunSpec
from testbed.rundir.directory import RunDirectory
from testbed.traits import traits
from testbed.view import View

SERVERS = (BROKER, AGGREGATOR, ROUTER)
"""Components of a run that serve all devices. Runs without links have no router."""


class Runtime(Protocol):
    """Starts, limits, changes and ends the processes of one run. All methods are called from one thread.

    A runtime labels everything that it starts with the run id, so that `testbed down` finds it after any
    crash and from any directory.
    """

    @property
    def meter(self) -> Meter:
        """Measures the resources of the hosts that the run uses."""

    def start(self) -> BrokerAccess:
        """Start broker, aggregator and all devices (in parallel); return the controller's login at the
        broker.

        Devices start without a CPU limit, because start-up is not part of the experiment. Raises
        HostError if this host cannot start them.
        """

    def limit(self, device: str) -> None:
        """Apply the CPU quota of `device`. Called each time its client becomes ready; no effect on a
        device that has ended."""

    def begin(self) -> None:
        """Prepare for the run clock, which starts next: all expected clients, or a quorum of them, are
        ready and limited."""

    def act(self, device: str, action: Action) -> list[AddressedOrder]:
        """Carry out an action on a device. See `testbed.run.scenario_player.Actuator`."""

    def exit_codes(self) -> dict[str, int]:
        """Exit codes of the components that have ended: `aggregator`, `broker`, `router`, or a
        device."""

    def restart(self, component: str) -> int | None:
        """Restart the broker or the aggregator after it has ended. Returns the port on 127.0.0.1 at
        which the controller reaches the broker, or None if it is unchanged. Raises HostError."""

    def stop(self) -> None:
        """End and remove everything of this run, and save logs to the run directory. Idempotent."""


@dataclass(frozen=True, slots=True)
class HostReading:
    """Measurements on another host that has devices of the run."""

    clock_uncertainty: float
    """Maximum error in seconds of that host's times after their conversion to this host's clock."""
    load: HostSample | None
    """Load since the previous reading; None if unknown, as for the first reading."""


class Meter(Protocol):
    """Measures the resources that a run uses, without changing anything. Called from the runtime's
    thread."""

    def telemetry(self) -> Sequence[Telemetry | GpuSample]:
        """One sample per device, if the runtime itself measures devices. Called about once a second."""
        return ()

    def externally_stopped(self) -> set[str]:
        """Components that somebody outside the testbed has stopped (by a signal or `docker pause`), if
        this host can see it."""

    def server_pids(self) -> list[int]:
        """Process ids of those of broker, aggregator and router that this host can see."""

    def device_cpu_seconds(self) -> float | None:
        """CPU seconds that all devices on this host have used together; None if they cannot be read."""

    def other_hosts(self, at: float, used: Mapping[str, float]) -> Mapping[str, HostReading]:
        """A reading of each other host with devices, by its name. `at` is the time of the run in
        seconds, `used` has the CPU seconds of each device so far."""
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
        """Make a live run from labels. Anyone may write the label `directory`: a path that is not
        absolute is ignored."""
        path = Path(directory or "")
        return cls(run, runtime, components, path if path.is_absolute() else None)


class Emulator(Protocol):
    """Functions of the module of a runtime in real time."""

    def is_available(self) -> bool:
        """Whether the runtime can be used on this host."""

    def check_host(self) -> None:
        """Check requirements of the host that the plan does not cover, such as an engine, before the run
        has a directory. Raises HostError with the reason if the host lacks one."""

    def launcher(self, spec: RunSpec, view: View) -> AbstractContextManager[Runtime]:
        """Return the runtime of one run, as a context around its start and stop. It first makes the
        things that runs share, such as images, and writes entries of the manifest. Raises HostError."""

    def live_runs(self) -> list[LiveRun]:
        """All runs with running or left-over processes or containers; empty if the runtime is not
        available."""

    def take_down(self, run: str, directory: RunDirectory | None) -> bool:
        """Remove what is left of `run`, and save its logs to `directory`, if there is one. Returns False
        if the runtime is not available. Raises HostError if something may be left."""

    def logs(self, run: str, tail: int) -> dict[str, list[str]]:
        """Last `tail` lines of the log of each component of the live `run` whose log is not yet in the
        run directory."""


class Simulator(Protocol):
    """Function of the module of a runtime in simulated time."""

    def run(self, spec: RunSpec, prepared: Prepared, view: View) -> events.RunEnded:
        """Execute the whole run in this process."""


def emulator(name: str) -> Emulator:
    """Return the runtime `name`. Raises BadInputError if there is none of that name."""
    return cast(Emulator, importlib.import_module(traits(name).module))


def simulator(name: str) -> Simulator:
    """Return the runtime `name`. Raises BadInputError if there is none of that name."""
    with without_garbage_collection():  # faster while PyTorch is imported
        return cast(Simulator, importlib.import_module(traits(name).module))
