"""The charts of a set of runs, computed once for all visitors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from analysis import comparison
from analysis.charts import CHARTS, PAGE_CHARTS
from analysis.charts.action_marks import ActionMarks, marks
from analysis.charts.chart import Chart, remarks
from analysis.charts.lanes import lanes
from analysis.charts.learning_curves import curves
from analysis.load import Run
from analysis.names import distinct
from testbed.dashboard import device_table
from testbed.dashboard.device_table import DeviceTable
from testbed.dashboard.feed import Feed
from testbed.dashboard.live_fidelity import CPU_WINDOW_SECONDS

MAX_COLUMNS = 3
"""Above this number of runs, the page shows only charts that contain all, else one column per run."""
_LIVE_LANE_UPDATES = 10_000
"""Maximum in the lanes of a live run: they are computed and sent twice a second."""
_REFRESH_INTERVAL_SECONDS = 0.45
"""Minimum time between two readings of the files, longer if reading is slow (`_MAX_CPU_SHARE`)."""
_MAX_CPU_SHARE = 1 / 3
"""Maximum share of a core that reading and computing may use."""
_MAX_TIME_SHARE = 1 / 2
"""Maximum share of the time that reading and computing may take, so that new visitors do not wait long
on a busy host."""


@dataclass(frozen=True, slots=True)
class Panel:
    name: str
    """Stays the same in all updates of the page."""
    column: int | None
    """Number from 0; None if the chart contains all runs."""
    chart: Chart

    @property
    def shown(self) -> bool:
        return not self.chart.is_bare


class Board:
    def __init__(self, feeds: Sequence[Feed]) -> None:
        self.feeds = tuple(feeds)
        self.generation = -1
        """Grows whenever `panels`, `tables` or `marks` change."""
        self.panels: tuple[Panel, ...] = ()
        self.tables: tuple[DeviceTable, ...] = ()
        self.marks: tuple[ActionMarks, ...] = ()
        """One entry per column, and a last one for charts of all runs if there are several."""
        self.remarks: tuple[tuple[str, ...], ...] = ()
        """Sentences that apply to several charts, per entry of `marks`."""
        self._due = 0.0

    @property
    def runs(self) -> tuple[Run, ...]:
        """Empty until all runs have started."""
        runs = tuple(feed.run for feed in self.feeds if feed.run is not None)
        return runs if len(runs) == len(self.feeds) else ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(distinct(self.runs))

    @property
    def columns(self) -> range:
        """Empty if there are too many runs."""
        return range(len(self.feeds) if len(self.feeds) <= MAX_COLUMNS else 0)

    @property
    def tasks(self) -> Mapping[str, Sequence[Run]]:
        """Runs of different tasks cannot be compared."""
        return comparison.by_task(self.runs)

    def refresh(self, *, at_once: bool = False) -> None:
        """Do nothing before the refresh interval has passed, unless `at_once`."""
        begin, spent = time.monotonic(), time.process_time()
        if begin < self._due and not at_once:
            return
        for feed in self.feeds:
            feed.refresh()
        generation = sum(feed.generation for feed in self.feeds)
        if generation != self.generation and self.runs:
            self._compute(self.runs)
        self.generation = generation
        self._due = begin + max(
            _REFRESH_INTERVAL_SECONDS,
            (time.process_time() - spent) / _MAX_CPU_SHARE,
            (time.monotonic() - begin) / _MAX_TIME_SHARE,
        )

    def _compute(self, runs: Sequence[Run]) -> None:
        drawn = tuple(self._panels(runs))
        self.panels = tuple(replace(one, chart=replace(one.chart, remarks=())) for one in drawn)
        charts = {panel.name: panel.chart for panel in self.panels}
        self.tables = tuple(
            device_table.table(runs[column], charts[f"devices-{column}"], live=self.feeds[column].live)
            for column in self.columns
        )
        together = [runs] if len(runs) > 1 else []
        self.marks = tuple(marks(own) for own in (*([runs[c]] for c in self.columns), *together))
        places = (*self.columns, *[None] * len(together))
        alone = len(runs) == 1  # then all charts show this run
        self.remarks = tuple(
            remarks(one.chart for one in drawn if alone or one.column == place) for place in places
        )

    def _panels(self, runs: Sequence[Run]) -> Iterator[Panel]:
        apart = bool(self.columns)
        yield Panel("accuracy", None, curves(runs, "accuracy", "time", apart=apart))
        yield Panel("loss", None, curves(runs, "loss", "time", apart=apart))
        for name, place in PAGE_CHARTS.items():
            if place.of_all_runs and any(map(place.wanted, runs)):
                yield Panel(name, None, CHARTS[name](runs))
        if not apart:
            yield Panel("time-to-accuracy", None, CHARTS["time-to-accuracy"](runs))
        names = self.names if len(runs) > 1 else ("",)
        for column in self.columns:
            feed, run = self.feeds[column], runs[column]
            for name, place in PAGE_CHARTS.items():
                if not place.of_all_runs and place.wanted(run):
                    made = chart(name, feed, run)
                    title = " · ".join(filter(None, (made.title, names[column])))
                    yield Panel(f"{name}-{column}", column, replace(made, title=title))


def chart(name: str, feed: Feed, run: Run) -> Chart:
    """Has a remark if the chart leaves records out."""
    if name == "devices":
        chart = lanes([run], _LIVE_LANE_UPDATES) if feed.live else lanes([run])
        # No fixed start of the time axis: it would be set again in every update and undo the visitor's
        # zoom.
        return replace(chart, x=replace(chart.x, limits=(None, None)))
    chart = CHARTS[name]([run])
    if name == "cpu" and feed.live:
        return chart.with_note(
            f"used in the last {CPU_WINDOW_SECONDS:.0f} s; a waiting device uses less than its share"
        )
    rows = PAGE_CHARTS[name].rows if name in PAGE_CHARTS else ""
    if rows == "samples" and feed.held_samples < feed.samples and not feed.live:
        return chart.with_remarks(f"the newest {feed.held_samples:,} of {feed.samples:,} samples")
    if rows == "updates" and feed.held < feed.updates:
        return chart.with_remarks(f"the newest {feed.held:,} of {feed.updates:,} updates")
    return chart
