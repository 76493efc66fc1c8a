"""Requested and measured figures of the segments that devices share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

from agents.config import WAYS, Background, Segment
from agents.links import background
from agents.timing.clock import in_device_time
from agents.wire import messages
from agents.wire.messages import MessageError, SegmentFigures
from testbed.fidelity.figures import Figure, SegmentFidelity
from testbed.plan.agent_configs import RunSpec
from testbed.rundir.tail import Samples

_WIRE = 1514 / 1448
"""Bytes on the wire per byte of a transfer."""


def of_run(spec: RunSpec, epoch: float, begin: float, end: float) -> tuple[SegmentFidelity, ...]:
    """Return the rows of the run `spec`. `epoch`: reading of the monotonic clock at device time 0, in
    device time. `begin` and `end`: device times in seconds."""
    if not spec.plan.segments:
        return ()
    samples = (
        in_device_time(one, spec.plan.dilation)
        for one in Samples(spec.directory.telemetry).read()
        if "segments" in one
    )
    shown = epoch + begin, epoch + end
    return measure_segments(spec.plan.segments, samples, spec.topology.seed, epoch, *shown)


def measure_segments(
    segments: Mapping[str, Segment],
    samples: Iterable[Mapping[str, Any]],
    seed: int,
    epoch: float,
    begin: float,
    end: float,
) -> tuple[SegmentFidelity, ...]:
    """Return a row for each segment and direction that was measured, or that has background traffic.
    `epoch`, `begin` and `end`: times of the samples' clock, in seconds of device time, at device time 0
    and at the begin and end of the run. Rates are in bit/s of device time.

    `segments`: the tree of the plan, by name. `samples`: messages of the router (`NetworkProbe`,
    `NetworkUse`). `seed`: seed of the run.
    """
    probed: dict[tuple[str, str], SegmentFigures] = {}
    passed: Counter[tuple[str, str]] = Counter()
    for sample in samples:
        if "seconds" not in sample:
            with suppress(MessageError):
                for figures in messages.of_telemetry(messages.NetworkProbe, sample).segments:
                    probed[figures.segment, figures.way] = figures
        elif begin < sample.get("at", -math.inf) <= end:
            with suppress(MessageError):
                for use in messages.of_telemetry(messages.NetworkUse, sample).segments:
                    passed[use.segment, use.way] += use.background
    found = []
    for name, segment in segments.items():
        for way in WAYS:
            kinds = [one for one in segment.background if one.way == way]
            below = sum(passed[one.name, way] for one in segments.values() if one.parent == name)
            figure = Figure()
            if kinds and end > begin and math.isfinite(end):
                offered = sum(_offered(one, seed, name, begin - epoch, end - epoch) for one in kinds)
                figure = Figure(offered, 8 * (passed[name, way] - below) / (end - begin))
            if (rates := probed.get((name, way))) is not None:
                alone, together = Figure(rates.reach, rates.alone), Figure(rates.full, rates.together)
                found.append(SegmentFidelity(name, way, alone, together, figure))
            elif kinds:
                found.append(SegmentFidelity(name, way, Figure(), Figure(), figure))
    return tuple(found)


def _offered(kind: Background, seed: int, segment: str, begin: float, end: float) -> float:
    """Return the mean rate in bit/s on the wire at which background traffic was offered from `begin` to
    `end`, if nobody switched it off."""
    if background.is_flows(kind):
        total = 0.0
        for at, size in background.transfers(kind, seed, segment):
            if at > end:
                break
            if at >= begin:
                total += 8 * size * _WIRE
        return total / (end - begin)
    total = 0.0
    for (at, rate), (until, _) in pairwise(_until(background.rates(kind, seed, segment), end)):
        total += rate * max(0.0, min(until, end) - max(at, begin))
    return total / (end - begin)


def _until(changes: Iterable[tuple[float, float]], end: float) -> Iterator[tuple[float, float]]:
    for at, rate in changes:
        if at >= end:
            break
        yield at, rate
    yield end, 0.0
