"""Figures of a run over device time, computed from its records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agents import events
from agents.device_actions import PowerOff
from analysis.tally import Tally

_POINTS = 500
"""Windows with a point after which the width doubles, which limits the points of long runs."""


@dataclass(frozen=True, slots=True)
class Point:
    at: float
    """Device time in seconds."""
    values: Mapping[str, float]


@dataclass(slots=True)
class Points:
    """Converter of records to points. The result depends only on the records, and not on when they are
    added.

    Each evaluation gives a point with `accuracy` and `loss`, and with `perplexity` = exp(loss) if the
    task has one. Each window with updates gives a point with the totals `updates`, `version`, `rejected`
    and `megabytes` of payloads, and with `updates_per_second` and the mean `staleness` in versions. If
    energy is counted, it has the totals `round_joules` (all rounds, also those whose update was lost)
    and `power_offs`.

    A window includes its end. It lasts 1 s of device time at first, and twice as long each time that
    `_POINTS` windows have given a point.
    """

    perplexity: bool = False
    _width: float = 1.0
    """Seconds."""
    _made: int = 0
    _begin: float = 0.0
    """Device time at which the current window begins, in seconds."""
    _tally: Tally = field(default_factory=lambda: Tally({}))
    _updates_before: int = 0
    """Updates before the current window; below, the sum of their staleness in versions."""
    _staleness_before: int = 0
    _energy: bool = False

    def add(self, record: events.Record) -> Iterator[Point]:
        """Yield the points that are complete now."""
        if record.at > self._begin + self._width or isinstance(record, events.RunEnded):
            yield from self._window(record.at)
        self._tally.add(record)
        match record:
            case events.RoundEnergy() | events.Acted(action=PowerOff()):
                self._energy = True
            case events.Evaluated(at=at, accuracy=accuracy, loss=loss):
                values = {"accuracy": accuracy, "loss": loss}
                if self.perplexity and loss < math.log(1e300):
                    values["perplexity"] = math.exp(loss)
                yield Point(at, {name: value for name, value in values.items() if value == value})

    def _window(self, now: float) -> Iterator[Point]:
        """If the current window has updates, yield its point. Begin the window that contains `now`."""
        tally = self._tally
        if (count := tally.updates - self._updates_before) > 0:
            end = min(now, self._begin + self._width)
            values = {
                "version": float(tally.version),
                "updates": float(tally.updates),
                "updates_per_second": count / ((end - self._begin) or self._width),
                "staleness": (tally.staleness_sum - self._staleness_before) / count,
                "megabytes": tally.bytes / 1e6,
                "rejected": float(tally.rejected),
            }
            if self._energy:
                values |= {"round_joules": tally.round_joules, "power_offs": float(tally.power_offs)}
            yield Point(end, values)
            self._updates_before, self._staleness_before = tally.updates, tally.staleness_sum
            self._made += 1
            if self._made % _POINTS == 0:
                self._width *= 2
        self._begin = max(0, math.ceil(now / self._width) - 1) * self._width
