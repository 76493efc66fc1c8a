"""Shared segments of the network in the analysis of runs and in all views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from agents import events
from agents.device_actions import Action, Disconnect, Reconnect, SetBackground
from analysis import part

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from analysis.charts.chart import Chart
    from analysis.load import Run
    from analysis.tally import DeviceTally, Tally

_MAX_SEGMENTS = 8
"""Segments in the chart of one run."""


class _UsedSegment(msgspec.Struct):
    """One direction, as in `agents.wire.messages.SegmentUse`."""

    segment: str
    way: str
    devices: dict[str, float]
    background: float = 0.0


class _UseLine(msgspec.Struct):
    """Like `agents.wire.messages.NetworkUse`; other fields are ignored."""

    at: float
    seconds: float
    segments: list[_UsedSegment]


_USES = msgspec.json.Decoder(_UseLine)


def _rows(line: bytes) -> Iterator[Mapping[str, Any]]:
    """A row per segment, direction and device, which is empty for background traffic."""
    use = _USES.decode(line)
    for one in use.segments:
        parts = {**one.devices, **({"": one.background} if one.background else {})}
        for name, sent in parts.items():
            row = {"at": use.at, "seconds": use.seconds, "segment": one.segment, "way": one.way}
            yield {**row, "device": name, "bytes": sent}


@dataclass(slots=True)
class SegmentTally:
    is_cut: bool = False
    rates: dict[str, float] = field(default_factory=dict)
    """bit/s of device time in the last second, by direction, if there was traffic."""

    @property
    def text(self) -> str:
        rates = " ".join(f"{way} {part.rate(bits)}" for way, bits in self.rates.items())
        return "cut" if self.is_cut else rates or "idle"


class SegmentsTally(part.FeatureTally):
    takes: ClassVar[tuple[type[events.Record], ...]] = (events.RunStarted, events.Acted)
    key: ClassVar[str] = "segments"

    def __init__(self, facts: part.Facts) -> None:
        self.segments = {str(name): SegmentTally() for name in facts.get("segments", ())}

    def add(self, record: events.Record, tally: Tally) -> part.Notice | None:
        if isinstance(record, events.RunStarted):
            for one in self.segments.values():
                one.is_cut = False
        elif isinstance(record, events.Acted) and record.device in self.segments:
            match record.action:
                case Disconnect() | Reconnect() as action:
                    is_cut = self.segments[record.device].is_cut = isinstance(action, Disconnect)
                    return part.Notice(record.at, "cut" if is_cut else "restored", record.device)
                case SetBackground() as action:
                    return part.Notice(record.at, str(_describe(action)), record.device)
        return None

    def sample(self, device: DeviceTally | None, at: float, values: Mapping[str, Any]) -> None:
        period = values.get("seconds", 0.0)
        if not (period and self.segments):
            return
        for segment in self.segments.values():
            segment.rates = {}
        for use in values["segments"]:
            if use["segment"] in self.segments:
                sent = sum(use.get("devices", {}).values()) + use.get("background", 0)
                self.segments[use["segment"]].rates[use["way"]] = 8 * sent / period

    def headline(self, tally: Tally) -> Iterable[tuple[str, str]]:
        return [(name, one.text) for name, one in self.segments.items()]


def _over_time(runs: Sequence[Run]) -> Chart:
    """Rates in each direction of the segments that carried the most; empty if the runs have none."""
    from analysis.charts.action_marks import with_actions
    from analysis.charts.chart import Axis, Chart, Layer, arrays, color
    from analysis.names import distinct

    layers: list[Layer] = []
    series = 0
    for name, run in distinct(runs).items():
        use = run.network
        total = use.groupby(["segment", "way"], observed=True)["bytes"].sum()
        for segment, way in list(total.sort_values(ascending=False).index)[:_MAX_SEGMENTS]:
            own = use[(use["segment"] == segment) & (use["way"] == way)]
            label = f"{segment} {way}" if len(runs) == 1 else f"{name} · {segment} {way}"
            for is_background in (False, True):
                rows = own[own["device"] == ""] if is_background else own
                sums = rows.groupby(["at", "seconds"])["bytes"].sum().reset_index()
                if sums.empty:
                    continue
                layers.append(
                    Layer(
                        f"{label} background" if is_background else label,
                        "line",
                        arrays(
                            x=(sums["at"] - sums["seconds"] / 2).to_numpy(),
                            y=(8e-3 * sums["bytes"] / sums["seconds"]).to_numpy(),
                        ),
                        color(series),
                        label=label,
                        legend=not is_background,
                        dashed=is_background,
                        hover={"segment": "$name", "kbit/s": "y", "device time (s)": "x"},
                    )
                )
            series += 1
    time, y = Axis("device time", "s", limits=(0.0, None)), Axis("rate", "kbit/s", limits=(0.0, None))
    chart = Chart("Use of segments", time, y, tuple(layers))
    return with_actions(chart.with_note("solid: all traffic, dashed: background"), runs)


def _describe(action: Action | None) -> str | None:
    return f"background {'on' if action.on else 'off'}" if isinstance(action, SetBackground) else None


class SegmentTables:
    __slots__ = ()
    network: pd.DataFrame
    """Bytes that passed each segment, by device and direction. Empty if the topology has no segments."""


PART = part.AnalysisPart(
    streams=[
        part.SampleTable(
            "network",
            "network",
            "segments",
            {
                "at": part.seconds("Device time at which the period ends", sign="any"),
                "seconds": part.seconds("Length of the period"),
                "segment": part.TableColumn("Name of the segment"),
                "way": part.TableColumn("`up` or `down`"),
                "device": part.TableColumn("Name of the device; empty for background traffic"),
                "bytes": part.size("Bytes that passed the segment in the period"),
                "monotonic": part.MONOTONIC,
            },
            rows=_rows,
            is_of_devices=False,
        )
    ],
    tally=SegmentsTally,
    charts={"segments-over-time": part.FeatureChart(_over_time, lambda run: not run.network.empty)},
    describe=_describe,
)
