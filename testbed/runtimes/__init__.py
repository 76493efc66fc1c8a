"""Runtimes: one module for each, and the protocols that they implement."""

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
"""Components of a run that serve all devices; without links there is no router."""


class Runtime(Protocol):
    """Starts, limits, changes and ends the processes of one run. All methods are called from one thread.

    A runtime labels all that it starts with the run id, so that `testbed down` finds it after any
    crash, from any directory.
    """

    @property
    def meter(self) -> Meter:
        """Measures what the run uses of its hosts."""

    def start(self) -> BrokerAccess:
        """Start broker, aggregator and every device (in parallel); return the controller's broker.

        Devices start without CPU limit: container start-up is not part of the experiment.
        Raises HostError when this machine cannot.
        """

    def limit(self, device: str) -> None:
        """Put `device` under its CPU quota: called whenever its client has become ready. One that has
        ended is left alone."""

    def begin(self) -> None:
        """Prepare for the run clock, which starts now: all that is awaited is ready and limited, or a
        quorum of it."""

    def act(self, device: str, action: Action) -> list[AddressedOrder]:
        """See `testbed.run.scenario_player.Actuator`."""

    def ended(self) -> dict[str, int]:
        """Exit code of each process (`aggregator`, `broker`, device names) that has ended."""

    def restart(self, component: str) -> int | None:
        """Start the broker or the aggregator again, which has ended; return the port of 127.0.0.1 where
        the controller finds the broker now, if that is another. Raises HostError."""

    def stop(self) -> None:
        """End and remove everything of this run, logs saved to the run directory. Idempotent."""


@dataclass(frozen=True, slots=True)
class HostReading:
    """Measurements on another host with devices."""

    clock_uncertainty: float
    """Seconds by which its times may be off at most, as converted to this host's clock."""
    load: HostSample | None
    """Load since the reading before; None: unknown, as for the first one."""


class Meter(Protocol):
    """Measures what a run uses of its hosts, and changes nothing. Called from the runtime's thread."""

    def telemetry(self) -> Sequence[Telemetry | GpuSample]:
        """One sample per device if the runtime itself takes them; called about once a second."""
        return ()

    def stopped(self) -> set[str]:
        """Processes and containers that somebody else has stopped (a signal, `docker pause`), as far as
        this host sees that."""

    def server_pids(self) -> list[int]:
        """Process ids of broker, aggregator and router, as far as this host sees them."""

    def device_cpu_seconds(self) -> float | None:
        """CPU seconds that all devices have used on this host; None if it does not see them."""

    def other_hosts(self, at: float, used: Mapping[str, float]) -> Mapping[str, HostReading]:
        """A reading of each other host with devices, by its name, at `at` seconds of the run; `used` has
        the CPU seconds that each device has used."""
        return {}


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that has something running, or left over, on this machine."""

    run: str
    runtime: str | None
    """None while nothing but its controller lives."""
    components: int
    """Containers or processes that run, the controller aside."""
    directory: Path | None
    """None where no label of the run names it."""

    @classmethod
    def labelled(cls, run: str, runtime: str | None, components: int, directory: str | None) -> LiveRun:
        """A live run from its labels; `directory` is a label's text, which anyone may have written."""
        path = Path(directory or "")
        return cls(run, runtime, components, path if path.is_absolute() else None)


class Emulator(Protocol):
    """The functions of the module of a runtime with a real clock."""

    def available(self) -> bool:
        """Whether the runtime can be used on this host."""

    def check_host(self) -> None:
        """Ask what a run needs of this host besides the plan, such as an engine: at once, before the run
        has a directory. Raises HostError with the reason if it would be refused."""

    def launcher(self, spec: RunSpec, view: View) -> AbstractContextManager[Runtime]:
        """The runtime of one run, from before its start to after its stop; what all runs
        share is made here, and its entries in the manifest are written. Raises HostError."""

    def live_runs(self) -> list[LiveRun]:
        """Every run of which something runs or is left; none where it is not available."""

    def take_down(self, run: str, directory: RunDirectory | None) -> bool:
        """Remove what is left of `run`, its logs saved to `directory`; False where it is not
        available. Raises HostError where something may be left."""

    def logs(self, run: str, tail: int) -> dict[str, list[str]]:
        """The last `tail` lines of each component's log, as far as the run directory lacks it while
        `run` lives."""


class Simulator(Protocol):
    """The function of the module of a runtime with a simulated clock."""

    def run(self, spec: RunSpec, prepared: Prepared, view: View) -> events.RunEnded:
        """Execute the whole run in this process."""


def emulator(name: str) -> Emulator:
    """Raises BadInputError where no runtime has that name."""
    return cast(Emulator, importlib.import_module(traits(name).module))


def simulator(name: str) -> Simulator:
    """Raises BadInputError where no runtime has that name."""
    with without_garbage_collection():  # PyTorch
        return cast(Simulator, importlib.import_module(traits(name).module))
