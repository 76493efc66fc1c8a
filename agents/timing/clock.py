"""Device time: the host's monotonic clock, slowed down where the run is dilated."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.timing.clock_sync import Estimate
from agents.timing.nanoseconds import Nanoseconds, to_seconds

_TIMES, _RATES = ("at", "since", "ran", "waited", "busy", "rtt", "jitter"), ("up", "down")
_POWERS = {**dict.fromkeys(_TIMES, 1), **dict.fromkeys(_RATES, -1)}
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
    """`dilation` is how many seconds of the host make one of the devices'.

    `aggregators` is the path of an estimate (`agents.timing.clock_sync`) of the clock of the
    aggregator's host, which is read again when it changes: if there is one, that clock is shown, not
    this host's.
    """

    def __init__(self, dilation: float, aggregators: str | None = None) -> None:
        self._dilation = dilation
        self._path = aggregators
        self._estimate: Estimate | None = None
        self._read = 0
        """When the file was changed that was read last."""
        self._shown: Nanoseconds = 0

    def now(self) -> Nanoseconds:
        """Device time since some moment that is the same for all processes of the run. It never goes
        back, also where a new estimate does."""
        return self.at(time.monotonic_ns(), now=True)

    def at(self, monotonic: Nanoseconds, *, now: bool = False) -> Nanoseconds:
        """What it showed when the monotonic clock showed `monotonic`."""
        if self._path is not None:
            monotonic = self._of_aggregator(monotonic, self._path)
            if now:
                monotonic = max(monotonic, self._shown)
            self._shown = max(monotonic, self._shown)
        return monotonic if self._dilation == 1 else round(monotonic / self._dilation)

    def _of_aggregator(self, monotonic: Nanoseconds, path: str) -> Nanoseconds:
        changed = Path(path).stat().st_mtime_ns
        if self._estimate is None or changed != self._read:
            self._estimate = Estimate.from_dict(json.loads(Path(path).read_text(encoding="ascii")))
            self._read = changed
        return self._estimate.other(monotonic)

    def takes(self, duration: Nanoseconds) -> float:
        """Seconds of the host that `duration` of device time takes."""
        return to_seconds(duration) * self._dilation
