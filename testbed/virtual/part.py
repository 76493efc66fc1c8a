"""Interface of features to a run in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Collection

from agents import features
from agents.device_actions import Action
from agents.wire.messages import NetworkUse
from testbed.plan.agent_configs import RunSpec
from testbed.virtual.device import VirtualHalf
from testbed.virtual.faults import World
from testbed.virtual.network import VirtualNetwork
from testbed.virtual.timing import EventQueue

Write = Callable[[features.Telemetry | NetworkUse], None]
"""Writes a sample to the run's telemetry."""


class VirtualFleet:
    """A feature of one run. The methods do nothing by default."""

    def begin(self, world: World) -> Collection[str]:
        """Called first. Return the devices that have no power at the start."""
        return ()

    def start(self) -> None:
        """The run clock has started."""

    def half(self, name: str) -> VirtualHalf | None:
        """None if this device does not have the feature."""
        return None

    def check(self, name: str) -> None:
        """Something has happened to a device: power it off or on if that is due."""

    def act(self, name: str, action: Action) -> bool:
        """An action of the scenario. Return False if it is not the feature's, but a device's."""
        return False

    @property
    def idle_callbacks(self) -> int:
        """Planned callbacks that only continue the feature. A run with no others is over, unless the
        feature `will_act`."""
        return 0

    @property
    def will_act(self) -> bool:
        """The feature changes some device although nothing else happens."""
        return False

    def sample(self) -> None:
        """Called when a model is evaluated."""

    def record(self, *, at_end: bool) -> None:
        """Called after each instant."""

    def end(self) -> None:
        """The clients end. All planned callbacks are removed."""


VirtualPart = Callable[[RunSpec, EventQueue, VirtualNetwork, Write], VirtualFleet | None]
"""Makes a feature of one run; None if the run does not have it."""
