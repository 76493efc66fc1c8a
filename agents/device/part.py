"""Interface of features to a device's init. The process runtime plays the init of its processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from agents import features
from agents.config import FeatureSettings
from agents.fields import FeatureAction
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.messages import Message


class CounterReading(NamedTuple):
    """Counters that only grow, except for a new process or container."""

    at: Nanoseconds
    """Time on the host's monotonic clock."""
    cpu: Nanoseconds
    """CPU time of a host core."""
    sent: int = 0
    """Bytes over the link."""
    received: int = 0
    """Bytes over the link."""


class ClientHost(Protocol):
    """Init of one device, as a feature uses it."""

    device: str
    """Name."""

    def counters(self) -> CounterReading: ...

    def now(self) -> float:
        """Monotonic time of the aggregator's host, in seconds."""

    @property
    def is_starting(self) -> bool:
        """A client is starting, and its CPU is not limited yet."""

    def publish(self, message: features.Telemetry, *, is_lossy: bool = False) -> None: ...

    def power_off(self, *, loses_memory: bool) -> None:
        """End the client without warning. It starts again after `PowerOn`, unless an order has ended it.
        With `loses_memory`, the client's files are erased before."""


class InitHalf:
    """A feature's half in the init of one device. The methods do nothing by default."""

    @property
    def allows_client(self) -> bool:
        """The device has power for a client."""
        return True

    def look(self) -> float:
        """Read the counters. Return the seconds until this is due again."""
        raise NotImplementedError

    def sample(self) -> None:
        """Publish a sample up to the last look."""

    def obey(self, order: Message) -> bool:
        """Return False for an order that is not the feature's."""
        return False

    def act(self, action: FeatureAction) -> bool:
        """Return False for an action that is not the feature's."""
        return False

    def set_present(self, *, is_present: bool) -> None:
        """Whether the device takes part in the run from now on."""


InitPart = Callable[[FeatureSettings, ClientHost], InitHalf | None]
"""Makes a feature's half for one device; None if this device does not have the feature."""
