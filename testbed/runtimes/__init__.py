"""How a planned run becomes something that runs: one module per runtime, one protocol for all."""

from __future__ import annotations

from typing import Any, Protocol

from agents.config import Broker
from agents.device_actions import Action
from testbed.director import Order


class Runtime(Protocol):
    """Starts, limits and ends the processes of one run. All methods are called from one thread.

    A runtime labels all that it starts with the run id, so that `testbed down` finds it after any
    crash, from any directory.
    """

    def start(self) -> Broker:
        """Start broker, aggregator and every device (in parallel); return the controller's broker.

        Devices start without CPU limit: container start-up is not part of the experiment.
        Raises HostError when this machine cannot.
        """

    def limit(self, device: str) -> None:
        """Put `device` under its CPU quota: called whenever its client has become ready."""

    def act(self, device: str, action: Action) -> list[Order]:
        """See `testbed.director.Stage`."""

    def ended(self) -> dict[str, int]:
        """Exit code of each process (`aggregator`, `broker`, device names) that has ended."""

    def telemetry(self) -> list[dict[str, Any]]:
        """One sample per device where the runtime itself takes them; called about once a second."""

    def stop(self) -> None:
        """End and remove everything of this run, logs saved to the run directory. Idempotent."""
