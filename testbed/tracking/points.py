"""The figures of a run over device time, out of its records. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agents import events

_POINTS = 500
"""So many points of one width are made, then the width is doubled: a run of any length stays small."""


@dataclass(frozen=True, slots=True)
class Point:
    at: float
    """Device time, in seconds."""
    values: Mapping[str, float]


@dataclass(slots=True)
class Points:
    """Makes points of records, the same of the same records, however they are handed in.

    Of each evaluation `accuracy` and `loss` (and `perplexity`, exp(loss)). Of each second of device time
    in which updates came (its end is part of it), later of several: `updates` and `version` so far,
    `updates_per_second`, mean `staleness` (versions) of these updates, `megabytes` of payloads so far,
    `rejected` so far.
    """

    perplexity: bool = False
    """Whether the task has one."""
    _width: float = 1.0
    """Seconds."""
    _made: int = 0
    _begin: float = 0.0
    """Of the present window."""
    _version: int = 0
    _updates: int = 0
    _rejected: int = 0
    _bytes: int = 0
    _staleness: list[int] = field(default_factory=list)
    """Of the updates of the present window."""

    def add(self, record: events.Record) -> Iterator[Point]:
        """The points that are complete with `record`."""
        if record.at > self._begin + self._width or isinstance(record, events.RunEnded):
            yield from self._window(record.at)
        match record:
            case events.UpdateApplied(staleness=staleness):
                self._updates += 1
                self._bytes += record.bytes
                self._staleness.append(staleness)
            case events.UpdateRejected():
                self._rejected += 1
            case events.VersionMade(version=version):
                self._version = version
            case events.Evaluated(at=at, accuracy=accuracy, loss=loss):
                values = {"accuracy": accuracy, "loss": loss}
                if self.perplexity and loss < math.log(1e300):
                    values["perplexity"] = math.exp(loss)
                yield Point(at, {name: value for name, value in values.items() if value == value})

    def _window(self, now: float) -> Iterator[Point]:
        """What was in the window that is over at `now`, which begins another one."""
        if self._staleness:
            count, end = len(self._staleness), min(now, self._begin + self._width)
            yield Point(
                end,
                {
                    "version": float(self._version),
                    "updates": float(self._updates),
                    "updates_per_second": count / ((end - self._begin) or self._width),
                    "staleness": sum(self._staleness) / count,
                    "megabytes": self._bytes / 1e6,
                    "rejected": float(self._rejected),
                },
            )
            self._staleness = []
            self._made += 1
            if self._made % _POINTS == 0:
                self._width *= 2
        self._begin = max(0, math.ceil(now / self._width) - 1) * self._width
