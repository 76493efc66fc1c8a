"""Analysis of a feature that `tests/test_new_feature.py` adds: devices become hot, and are throttled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from agents.heat import Throttled  # type: ignore[import-not-found, unused-ignore]

from agents import events
from analysis import part

if TYPE_CHECKING:
    from analysis.charts.chart import Chart
    from analysis.load import Run
    from analysis.tally import DeviceTally, Tally


@dataclass(slots=True)
class Heat:
    degrees: float = nan


class HeatTally(part.FeatureTally):
    takes: ClassVar[tuple[type[Any], ...]] = (Throttled,)
    key: ClassVar[str] = "heat"

    def __init__(self, facts: part.Facts) -> None:
        self.times = 0

    def add(self, record: events.Record, tally: Tally) -> part.Notice:
        self.times += 1
        return part.Notice(record.at, "throttled", str(getattr(record, "client", "")))

    def sample(self, device: DeviceTally | None, at: float, values: Mapping[str, Any]) -> None:
        if device is not None:
            device.part(Heat).degrees = part.known_number(values["heat"]["degrees"])

    def headline(self, tally: Tally) -> Iterable[tuple[str, str]]:
        return [("", f"throttled {self.times} times")]

    def totals(self) -> Mapping[str, float]:
        return {"throttled": float(self.times)}


def used(run: Run, at: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Degrees of all devices times seconds."""
    return np.asarray(at, np.float64) * float(run.more["heat"]["degrees"].mean())


def over_time(runs: Sequence[Run]) -> Chart:
    from analysis.charts import telemetry

    return telemetry.share_of(runs, "Heat", "heat", "heat", "degrees", "heat")


PART = part.AnalysisPart(
    needs={"heat": lambda device: "heat" in device},
    records=[
        part.RecordTable(
            Throttled,
            "throttled",
            {"at": part.AT, "client": part.CLIENT, "degrees": part.number("Heat", unit="°C")},
            names="client",
        )
    ],
    streams=[
        part.SampleTable(
            "heat_sample",
            "heat",
            "heat",
            {
                "device": part.DEVICE,
                "at": part.AT,
                "degrees": part.number("Heat", unit="°C"),
                "monotonic": part.MONOTONIC,
            },
        )
    ],
    tally=HeatTally,
    figures=[
        part.DeviceFigure(
            name="degrees",
            about="Heat of the device, in °C.",
            of=lambda device, *_: device.part(Heat).degrees,
            needs="heat",
            title="heat",
            text=lambda value: "–" if isnan(value) else f"{value:.0f}",
            heading="heat (°C)",
            page_text=part.formatted("{:.0f}"),
            table=lambda run, live: (
                run.more["heat"].groupby(run.more["heat"]["device"].astype(str))["degrees"].last()
            ),
            orders={"hottest": False},
            metric="heat_celsius",
        )
    ],
    facts=lambda run: {"throttled": f"{len(run.more['throttled'])} times"},
    summary=[
        part.SummaryColumn(
            "hottest",
            lambda run: run.more["heat"].groupby("device", observed=False)["degrees"].max(),
            together="max",
            unit="°C",
            title="°C",
        )
    ],
    progress=[
        part.ProgressFigure(
            "heat",
            "heat of all devices",
            "K·s",
            used,
            wanted=lambda _: True,
            words=("stays cooler", "hotter"),
        )
    ],
    charts={"heat-over-time": part.FeatureChart(over_time, lambda _: True, in_report=True)},
    counters=[part.TraceCounter("heat", "degrees", "heat (°C)")],
)
