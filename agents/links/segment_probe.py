"""Measurement of segments before the run clock starts: which senders have to fill which segment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from agents.config import Segment, Way, path_of
from agents.links.max_min import Sender, rates_on
from agents.wire.messages import SegmentFigures

_TRIES = 3
"""Maximum number of measurements of a segment."""
_MAX_SECONDS, _MAX_TOTAL_SECONDS = 0.5, 8.0
"""Maximum duration of a measurement, and of all measurements of one direction together."""
_NEAR = 0.02
"""A measurement within this relative distance of the expected rate is the last."""


@dataclass(frozen=True, slots=True)
class SegmentProbe(Generic[Sender]):
    """One direction of a segment. Rates are expected ones, in bit/s."""

    segment: str
    way: Way
    alone: Mapping[Sender, float]
    """The fastest single sender."""
    together: Mapping[Sender, float]
    """All senders below the segment."""
    seconds: float

    @property
    def loads(self) -> tuple[Mapping[Sender, float], ...]:
        """Senders of each measurement."""
        return (self.alone, self.together) if len(self.together) > 1 else (self.alone,)

    def figures(self, measured: Sequence[float]) -> SegmentFigures:
        """Expected figures, with those measured. `measured`: bit/s of each of `loads`."""
        full, reach = (round(sum(one.values())) for one in (self.together, self.alone))
        return SegmentFigures(self.segment, self.way, full, reach, measured[0], measured[-1])


def probes(
    senders: Mapping[Sender, str], segments: Mapping[str, Segment], way: Way
) -> Iterator[SegmentProbe[Sender]]:
    """Each segment with a rate in the direction `way` and senders below it. `senders`: name of the
    segment that each is attached to. `segments`: the tree."""
    paths = {sender: {one.name for one in path_of(name, segments)} for sender, name in senders.items()}
    found = []
    for name, segment in segments.items():
        below = {sender: senders[sender] for sender, path in paths.items() if name in path}
        if segment.rate(way) is not None and below:
            single = (rates_on({sender: at}, segments, way) for sender, at in below.items())
            alone = max(single, key=lambda one: sum(one.values()))
            found.append((name, alone, rates_on(below, segments, way)))
    seconds = min(_MAX_SECONDS, _MAX_TOTAL_SECONDS / max(1, 2 * len(found)))
    for name, alone, together in found:
        yield SegmentProbe(name, way, alone, together, seconds)


def is_enough(measured: Sequence[float], load: Mapping[Sender, float]) -> bool:
    """A rate is close to the expected one, or there are as many as allowed."""
    expected = sum(load.values())
    return len(measured) >= _TRIES or any(abs(rate / expected - 1) <= _NEAR for rate in measured)


def nearest(measured: Sequence[float], load: Mapping[Sender, float]) -> float:
    """Measured rate that is nearest to the expected one."""
    return min(measured, key=lambda one: abs(one - sum(load.values())))
