"""What a device's telemetry comes to over the last seconds. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any, Literal, NamedTuple

from agents.events import LARGEST

_WINDOW_SECONDS = 5.0
"""Seconds that figures are taken over: shorter ones jump."""
_MAX_AGE_SECONDS = 3.0
"""Seconds after which the newest sample says nothing of now."""


class _Sample(NamedTuple):
    at: float
    cpu: float
    """Seconds since the device's start."""
    sent: float
    """Bytes since then, as `received`; NaN where nobody counts them."""
    received: float
    memory: float
    """Bytes in use; NaN where that is not told."""


@dataclass(slots=True)
class Usage:
    _samples: deque[_Sample] = field(default_factory=deque)

    def take(self, at: float, values: Mapping[str, Any]) -> None:
        """Take a sample (`agents.device.resource_usage`) of device time `at`. Devices may send anything:
        one without a sane CPU time is ignored."""
        figures = (number(values.get(name)) for name in ("cpu", "sent", "received", "memory"))
        sample = _Sample(at, *figures)
        last = self._samples[-1] if self._samples else None
        if not sample.cpu >= 0 or (last is not None and at <= last.at):
            return
        if last is not None and (
            sample.cpu < last.cpu or sample.sent < last.sent or sample.received < last.received
        ):
            self._samples.clear()  # it was started anew
        self._samples.append(sample)
        while self._samples[0].at < at - _WINDOW_SECONDS:
            self._samples.popleft()

    @property
    def latest(self) -> float:
        """Share of a core from the last sample but one to the last; NaN without these."""
        if len(self._samples) < 2:
            return nan
        before, last = self._samples[-2], self._samples[-1]
        return (last.cpu - before.cpu) / (last.at - before.at)

    def share(self, at: float) -> float:
        """Share of a core over the last seconds; NaN where that is not known."""
        return self._rate("cpu", at)

    def memory(self, at: float) -> float:
        """Bytes in use, as `share`."""
        fresh = bool(self._samples) and self._samples[-1].at >= at - _MAX_AGE_SECONDS
        return self._samples[-1].memory if fresh else nan

    def up(self, at: float) -> float:
        """bit/s sent, as `share`."""
        return 8 * self._rate("sent", at)

    def down(self, at: float) -> float:
        """bit/s received, as `share`."""
        return 8 * self._rate("received", at)

    def _rate(self, counter: Literal["cpu", "sent", "received"], at: float) -> float:
        """By how much `counter` grew per second, from the first sample to the last."""
        if len(self._samples) < 2 or self._samples[-1].at < at - _MAX_AGE_SECONDS:
            return nan
        first, last = self._samples[0], self._samples[-1]
        grown: float = getattr(last, counter) - getattr(first, counter)
        return grown / (last.at - first.at)


def number(value: object) -> float:
    """NaN where it is none, or too large for a float."""
    return float(value) if isinstance(value, int | float) and abs(value) <= LARGEST else nan
