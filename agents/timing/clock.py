"""Device time: the host's monotonic clock, slowed down by the dilation of the run, and threads in real
time."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agents.timing.clock_sync import Estimate
from agents.timing.nanoseconds import Nanoseconds, to_seconds

_TIMES = ("at", "since", "ran", "waited", "busy", "rtt", "jitter", "seconds")
_RATES = ("up", "down", "full", "reach", "alone", "together")
_POWERS = {**dict.fromkeys(_TIMES, 1), **dict.fromkeys(_RATES, -1)}
"""Exponent n of each field of a link or sample: the value in host time is that in device time ×
dilationⁿ: durations are longer, rates are lower. Other fields are the same, such as CPU seconds, because
a CPU share is CPU seconds of the host per device second."""


def in_host_time(values: Mapping[str, Any], dilation: float) -> dict[str, Any]:
    """Fields of a link or of a sample."""

    def converted(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return in_host_time(value, dilation)
        if isinstance(value, list):
            return [converted(name, one) for one in value]
        return value if value is None or name not in _POWERS else value * dilation ** _POWERS[name]

    return {name: converted(name, value) for name, value in values.items()}


def in_device_time(values: Mapping[str, Any], dilation: float) -> dict[str, Any]:
    return in_host_time(values, 1 / dilation)


class DeviceClock:
    """`dilation`: host seconds per device second. `aggregators`: path of a file with an estimate
    (`agents.timing.clock_sync`) of the clock of the aggregator's host, which device time follows, and
    which is read again when it changes; None for this host's clock."""

    def __init__(self, dilation: float, aggregators: str | None = None) -> None:
        self._dilation = dilation
        self._path = aggregators
        self._estimate: Estimate | None = None
        self._read = 0
        """Modification time of the file when last read, in ns."""
        self._shown: Nanoseconds = 0
        """Latest time of that clock for which a device time was returned."""

    def now(self) -> Nanoseconds:
        """Since a moment that is the same for all processes of the run. It never goes back, even if a
        new estimate shows an earlier time."""
        return self.at(time.monotonic_ns(), now=True)

    def at(self, monotonic: Nanoseconds, *, now: bool = False) -> Nanoseconds:
        """Device time when this host's clock shows `monotonic`. If `now`, that is the current time, and
        the result is at least as late as all previous ones."""
        if self._path is not None:
            monotonic = self._of_aggregator(monotonic, self._path)
            if now:
                monotonic = max(monotonic, self._shown)
            self._shown = max(monotonic, self._shown)
        return monotonic if self._dilation == 1 else round(monotonic / self._dilation)

    def _of_aggregator(self, monotonic: Nanoseconds, path: str) -> Nanoseconds:
        """Convert a time of this host's monotonic clock to the time of the aggregator's host, with the
        estimate in the file `path`."""
        changed = Path(path).stat().st_mtime_ns
        if self._estimate is None or changed != self._read:
            self._estimate = Estimate.from_dict(json.loads(Path(path).read_text(encoding="ascii")))
            self._read = changed
        return self._estimate.other(monotonic)

    def takes(self, duration: Nanoseconds) -> float:
        """Host seconds."""
        return to_seconds(duration) * self._dilation


def make_realtime() -> None:
    """The calling thread runs without delay even if all cores are busy. No effect without
    CAP_SYS_NICE."""
    if sys.platform == "linux":
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
