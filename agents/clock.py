"""Device time: the host's monotonic clock, slowed down where the run is dilated."""

from __future__ import annotations

import time


class Clock:
    """`dilation` is how many seconds of the host make one of the devices'."""

    def __init__(self, dilation: float) -> None:
        self._dilation = dilation

    def now(self) -> float:
        """Seconds of device time since some moment that is the same for all processes of the host."""
        return self.at(time.monotonic())

    def at(self, monotonic: float) -> float:
        """What it showed when the monotonic clock showed `monotonic`."""
        return monotonic / self._dilation

    def takes(self, seconds: float) -> float:
        """Seconds of the host that `seconds` of device time take."""
        return seconds * self._dilation
