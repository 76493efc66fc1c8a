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
"""Maximum number of seconds of one measurement, and of all measurements of one direction together."""
_NEAR = 0.02
"""The first measurement within this relative distance of the expected rate is the last."""


@dataclass(frozen=True, slots=True)
class SegmentProbe(Generic[Sender]):
    """Measurement of one direction of a segment. The senders' expected rates are in bit/s."""

    segment: str
    way: Way
    alone: Mapping[Sender, float]
    """The fastest single sender, with its expected rate."""
    together: Mapping[Sender, float]
    """All senders below the segment, with their expected rates."""
    seconds: float
    """Duration of a measurement."""

    @property
    def loads(self) -> tuple[Mapping[Sender, float], ...]:
        """Senders of each measurement."""
        return (self.alone, self.together) if len(self.together) > 1 else (self.alone,)

    def figures(self, measured: Sequence[float]) -> SegmentFigures:
        """Return the expected figures with those measured. `measured`: rate of each of `loads` in
        bit/s."""
        full, reach = (round(sum(one.values())) for one in (self.together, self.alone))
        return SegmentFigures(self.segment, self.way, full, reach, measured[0], measured[-1])


def probes(
    senders: Mapping[Sender, str], segments: Mapping[str, Segment], way: Way
) -> Iterator[SegmentProbe[Sender]]:
    """Yield a measurement for each segment that has a rate in the direction `way` and senders below it.
    `senders`: name of the segment that each is attached to. `segments`: the tree, by name."""
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
    """Whether `load` need not be measured again after these rates: one is close to the expected rate, or
    they are as many as allowed."""
    expected = sum(load.values())
    return len(measured) >= _TRIES or any(abs(rate / expected - 1) <= _NEAR for rate in measured)


def nearest(measured: Sequence[float], load: Mapping[Sender, float]) -> float:
    """Return the measured rate that is nearest to the expected rate of `load`."""
    return min(measured, key=lambda one: abs(one - sum(load.values())))
