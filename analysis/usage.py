"""Resource usage of a device from its telemetry: over the last seconds, and in total."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any, Literal, NamedTuple

from agents.events import LARGEST

_WINDOW_SECONDS = 5.0
"""Window for rates, which fluctuate too much over shorter ones."""
_MAX_AGE_SECONDS = 3.0
"""If the newest sample is older, the present figures are unknown."""


class _TimedFigures(NamedTuple):
    at: float
    """Device time in seconds."""
    cpu: float
    """CPU seconds since the start of the device."""
    sent: float
    """Bytes since the start of the device; NaN if they are not counted."""
    received: float
    """Bytes since the start of the device; NaN if they are not counted."""
    memory: float
    """Bytes in use; NaN if unknown."""


@dataclass(slots=True)
class DeviceUsage:
    """The latest samples of a device, and the figures computed from them."""

    totals: Counter[str] = field(default_factory=Counter)
    """CPU seconds `cpu` and bytes `sent` and `received`. They go on where a device restarts, which
    counts from 0 again. What is not counted is left out."""
    latest: float = nan
    """Share of a core used between the last two samples; NaN if there are fewer than two samples."""
    _counters: dict[str, float] = field(default_factory=dict)
    """Last known value of each counter."""
    _samples: deque[_TimedFigures] = field(default_factory=deque)

    def add(self, at: float, values: Mapping[str, Any]) -> None:
        """Add a sample (`agents.device.resource_usage`). Devices may send anything: one without valid
        CPU time is ignored."""
        figures = (number(values.get(name)) for name in ("cpu", "sent", "received", "memory"))
        sample = _TimedFigures(at, *figures)
        last = self._samples[-1] if self._samples else None
        if not sample.cpu >= 0 or (last is not None and at <= last.at):
            return
        before_cpu = self.totals["cpu"]
        for name in ("cpu", "sent", "received"):
            if (now := getattr(sample, name)) >= 0:
                before = self._counters.get(name, 0.0)
                self.totals[name] += now - before if now >= before else now
                self._counters[name] = now
        if last is not None:
            self.latest = (self.totals["cpu"] - before_cpu) / (at - last.at)
        if last is not None and (
            sample.cpu < last.cpu or sample.sent < last.sent or sample.received < last.received
        ):
            self._samples.clear()  # the device was restarted
        self._samples.append(sample)
        while self._samples[0].at < at - _WINDOW_SECONDS:
            self._samples.popleft()

    @property
    def last_memory(self) -> float:
        """Memory in use at the last sample, in bytes; NaN if unknown."""
        return self._samples[-1].memory if self._samples else nan

    def share(self, at: float) -> float:
        """Share of a core over the last seconds before `at`; NaN if unknown."""
        return self._rate("cpu", at)

    def memory(self, at: float) -> float:
        """Bytes at `at`; NaN if unknown."""
        fresh = bool(self._samples) and self._samples[-1].at >= at - _MAX_AGE_SECONDS
        return self.last_memory if fresh else nan

    def up(self, at: float) -> float:
        """bit/s over the last seconds before `at`; NaN if unknown."""
        return 8 * self._rate("sent", at)

    def down(self, at: float) -> float:
        """bit/s over the last seconds before `at`; NaN if unknown."""
        return 8 * self._rate("received", at)

    def _rate(self, counter: Literal["cpu", "sent", "received"], at: float) -> float:
        """Growth per second between the first and the last kept sample; NaN if there are fewer than two,
        or if the last is too old."""
        if len(self._samples) < 2 or self._samples[-1].at < at - _MAX_AGE_SECONDS:
            return nan
        first, last = self._samples[0], self._samples[-1]
        grown: float = getattr(last, counter) - getattr(first, counter)
        return grown / (last.at - first.at)


@dataclass(slots=True)
class EnergyUse:
    """The latest sample (`agents.wire.messages.EnergyFigures`)."""

    at: float = nan
    """Device time in seconds; NaN before the first sample."""
    consumed: float = nan
    """Joules."""
    power: float = nan
    """Watts, since the sample before."""
    level: float = nan
    """Share of the battery's capacity; NaN without a battery."""

    def add(self, at: float, values: Mapping[str, Any]) -> None:
        """Devices may send anything: a sample without valid consumption is ignored."""
        consumed = number(values.get("consumed"))
        if consumed >= 0 and not at <= self.at:
            self.at, self.consumed = at, consumed
            self.power, self.level = number(values.get("power")), number(values.get("level"))


def number(value: object) -> float:
    """NaN if `value` is no number or too large."""
    return float(value) if isinstance(value, int | float) and abs(value) <= LARGEST else nan
