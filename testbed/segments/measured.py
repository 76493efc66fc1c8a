"""Requested and measured figures of the segments that devices share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from agents import events
from agents.config import WAYS, Background, Segment, Way, path_of
from agents.device_actions import Disconnect, Reconnect, SetBackground
from agents.links import background
from agents.timing.clock import in_device_time
from agents.wire import messages
from agents.wire.messages import MessageError, NetworkUse, SegmentFigures
from testbed.fidelity.figures import Figure, rounded
from testbed.fidelity.part import Evidence, FeatureFigures, LegClock
from testbed.fidelity.table import figure_cells
from testbed.fidelity.validity import more_text
from testbed.plan.agent_configs import RunSpec
from testbed.rundir.live_files import Samples

Span = tuple[float, float]
"""Begin and end, in seconds of device time."""
_WIRE = 1514 / 1448
"""Bytes on the wire per byte of a transfer."""


_COLUMNS = {"alone": "alone Mbit/s", "together": "all Mbit/s", "background": "background Mbit/s"}
_ERROR_PERCENT = 5.0
"""Maximum error of a segment's rate, in %."""


@dataclass(frozen=True, slots=True)
class SegmentFidelity:
    """Requested and measured figures of one direction of a segment, in bit/s on the wire."""

    segment: str
    way: str
    alone: Figure
    """Rate of a single sender, before the run clock started."""
    together: Figure
    """Rate of all senders at once, before the run clock started."""
    background: Figure
    """Mean rate of the segment's own background traffic: offered and delivered."""

    def as_dict(self) -> dict[str, Any]:
        figures = (("alone", self.alone), ("together", self.together), ("background", self.background))
        return {
            name: {"asked": rounded(one.requested), "got": rounded(one.got), "error": rounded(one.error)}
            for name, one in figures
            if one != Figure()
        }


def figures(evidence: Evidence) -> FeatureFigures | None:
    found = of_run(evidence.spec, evidence.records, evidence.clock)
    entry: dict[str, dict[str, Any]] = {}
    for one in found:
        entry.setdefault(one.segment, {})[one.way] = one.as_dict()
    shown = [name for name in _COLUMNS if any(getattr(one, name) != Figure() for one in found)]
    doubt = segment_doubt(found)
    return FeatureFigures(
        feature="segments",
        entry=entry,
        titles=["segment", *(title for name in shown for title in (_COLUMNS[name], "got", "error"))],
        rows=[
            [
                f"{one.segment} {one.way}",
                *(c for name in shown for c in figure_cells(getattr(one, name), 1e-6)),
            ]
            for one in found
        ],
        reasons=() if doubt is None else (doubt,),
    )


def of_run(
    spec: RunSpec, records: Iterable[events.Record], clock: LegClock
) -> tuple[SegmentFidelity, ...]:
    """`clock`: in device time."""
    segments = spec.plan.segments
    if not segments:
        return ()
    samples = (
        in_device_time(one, spec.plan.dilation)
        for one in Samples(spec.directory.telemetry).read()
        if "segments" in one
    )
    traffic_spans = {
        name: [*background_spans(name, segments, records, clock.begin, clock.end)] for name in segments
    }
    return measure_segments(segments, samples, spec.topology.seed, clock.epoch, traffic_spans)


def background_spans(
    name: str,
    segments: Mapping[str, Segment],
    records: Iterable[events.Record],
    begin: float,
    end: float,
) -> Iterator[Span]:
    """Yield the times at which the background traffic was on, and no segment on its path was cut."""
    path = {one.name for one in path_of(name, segments)}
    stopped: set[tuple[str, type]] = set()
    since = begin
    for record in records:
        if not (isinstance(record, events.Acted) and record.device in path and record.at >= begin):
            continue
        was_on = not stopped
        match record.action:
            case SetBackground(is_on) if record.device == name:
                (stopped.discard if is_on else stopped.add)((name, SetBackground))
            case Disconnect():
                stopped.add((record.device, Disconnect))
            case Reconnect():
                stopped.discard((record.device, Disconnect))
        if was_on and stopped:
            yield since, record.at
        elif stopped or was_on:
            continue
        since = record.at
    if not stopped:
        yield since, end


def measure_segments(
    segments: Mapping[str, Segment],
    samples: Iterable[Mapping[str, Any]],
    seed: int,
    epoch: float,
    traffic_spans: Mapping[str, Sequence[Span]],
) -> tuple[SegmentFidelity, ...]:
    """Return a row for each segment and direction that was measured, or that has background traffic.
    Rates are in bit/s of device time.

    `samples`: messages of the router (`NetworkProbe`, `NetworkUse`). `epoch`: the samples' clock at
    device time 0, in seconds of device time. `traffic_spans`: device times at which each segment's
    background traffic was on. It is judged over these times; not at all if they are empty or have no
    end.
    """
    probed: dict[tuple[str, str], SegmentFigures] = {}
    uses: list[NetworkUse] = []
    for sample in samples:
        with suppress(MessageError):
            if "seconds" in sample:
                uses.append(messages.of_telemetry(NetworkUse, sample))
            else:
                for figures in messages.of_telemetry(messages.NetworkProbe, sample).segments:
                    probed[figures.segment, figures.way] = figures
    found = []
    for name, segment in segments.items():
        spans = traffic_spans.get(name, ())
        duration = math.fsum(end - begin for begin, end in spans)
        children = {one.name for one in segments.values() if one.parent == name}
        for way in WAYS:
            kinds = [one for one in segment.background if one.way == way]
            figure = Figure()
            if kinds and 0 < duration < math.inf:
                offered = math.fsum(_offered(one, seed, name, spans) for one in kinds)
                passed = _passed(uses, way, name, children, [(epoch + a, epoch + b) for a, b in spans])
                figure = Figure(8 * offered / duration, 8 * passed / duration)
            if (rates := probed.get((name, way))) is not None:
                alone, together = Figure(rates.reach, rates.alone), Figure(rates.full, rates.together)
                found.append(SegmentFidelity(name, way, alone, together, figure))
            elif kinds:
                found.append(SegmentFidelity(name, way, Figure(), Figure(), figure))
    return tuple(found)


def _passed(
    uses: Iterable[NetworkUse], way: Way, name: str, children: Collection[str], spans: Sequence[Span]
) -> float:
    """Bytes of the segment's own background traffic that passed it during `spans`, in proportion if
    between two reports. `children`: segments below it, whose background traffic is not its own."""
    total = 0.0
    for use in uses:
        shown = math.fsum(_overlap((use.at - use.seconds, use.at), span) for span in spans)
        for one in use.segments if shown else ():
            if one.way == way and (one.segment == name or one.segment in children):
                sign = 1 if one.segment == name else -1
                total += sign * one.background * shown / use.seconds
    return total


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _offered(kind: Background, seed: int, segment: str, spans: Sequence[Span]) -> float:
    """Bytes on the wire that background traffic offered during `spans`."""
    end = spans[-1][1]
    if background.is_flows(kind):
        arrivals = itertools.takewhile(
            lambda one: one[0] <= end, background.transfers(kind, seed, segment)
        )
        return math.fsum(
            size * _WIRE for at, size in arrivals if any(begin <= at <= until for begin, until in spans)
        )
    changes = pairwise(_until(background.rates(kind, seed, segment), end))
    return math.fsum(
        rate / 8 * _overlap((at, until), span) for (at, rate), (until, _) in changes for span in spans
    )


def _until(changes: Iterable[tuple[float, float]], end: float) -> Iterator[tuple[float, float]]:
    for at, rate in changes:
        if at >= end:
            break
        yield at, rate
    yield end, 0.0


def segment_doubt(segments: Sequence[SegmentFidelity], limit: float = _ERROR_PERCENT) -> str | None:
    """Sentence on segments with an error above `limit` (%) before the start of the run; None if there is
    none."""
    off = _segments_beyond(segments, limit)
    if not off:
        return None
    _, worst, figure = max(off, key=lambda entry: entry[0])
    senders = "one sender" if figure is worst.alone else "all senders"
    return (
        f"the rate {worst.way} of segment {worst.segment} for {senders} was {figure.error:+.1f} % off "
        f"the requested one{more_text(len(off))}"
    )


def wrong_segments(segments: Sequence[SegmentFidelity]) -> list[str]:
    """Return the segments whose rate, as measured before the run, counts against it."""
    off = _segments_beyond(segments, _ERROR_PERCENT)
    return [*dict.fromkeys(one.segment for _, one, _ in off)]


def _segments_beyond(
    segments: Sequence[SegmentFidelity], limit: float
) -> list[tuple[float, SegmentFidelity, Figure]]:
    return [
        (figure.distance, one, figure)
        for one in segments
        for figure in (one.alone, one.together)
        if figure.distance > limit
    ]
