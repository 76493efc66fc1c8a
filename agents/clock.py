"""Device time: the host's monotonic clock, slowed down where the run is dilated."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from agents.nanoseconds import Nanoseconds, to_seconds

_POWERS = {"at": 1, "ran": 1, "waited": 1, "rtt": 1, "jitter": 1, "up": -1, "down": -1}
"""Of the dilation, by which fields of links and samples differ on the host: what takes a time takes
longer there, and rates are lower. All else is the same, CPU seconds too: a share is CPU seconds of the
host per device second."""


def in_host_time(values: Mapping[str, Any], dilation: float) -> dict[str, Any]:
    """Fields of a link or of a sample in device time, as the host has them."""

    def converted(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return in_host_time(value, dilation)
        return value if value is None or name not in _POWERS else value * dilation ** _POWERS[name]

    return {name: converted(name, value) for name, value in values.items()}


def in_device_time(values: Mapping[str, Any], dilation: float) -> dict[str, Any]:
    """Fields of a link or of a sample as the host has them, in device time."""
    return in_host_time(values, 1 / dilation)


class Clock:
    """`dilation` is how many seconds of the host make one of the devices'."""

    def __init__(self, dilation: float) -> None:
        self._dilation = dilation

    def now(self) -> Nanoseconds:
        """Device time since some moment that is the same for all processes of the host."""
        return self.at(time.monotonic_ns())

    def at(self, monotonic: Nanoseconds) -> Nanoseconds:
        """What it showed when the monotonic clock showed `monotonic`."""
        return monotonic if self._dilation == 1 else round(monotonic / self._dilation)

    def takes(self, duration: Nanoseconds) -> float:
        """Seconds of the host that `duration` of device time takes."""
        return to_seconds(duration) * self._dilation
