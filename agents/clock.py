"""Device time: the host's monotonic clock, slowed down where the run is dilated."""

from __future__ import annotations

import time

from agents.nanoseconds import Nanoseconds, to_seconds


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
