"""The charts of a set of runs, computed once for all who look at them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from analysis import comparison
from analysis.charts import CHARTS
from analysis.charts.action_marks import ActionMarks, marks
from analysis.charts.chart import Chart
from analysis.charts.lanes import lanes
from analysis.charts.learning_curves import curves
from analysis.load import Run
from analysis.names import distinct
from testbed.dashboard import device_table
from testbed.dashboard.device_table import Table
from testbed.dashboard.feed import Feed
from testbed.dashboard.live_fidelity import CPU_WINDOW_SECONDS
from testbed.traits import is_simulated

MAX_COLUMNS = 3
"""Runs that stand beside each other; of more only what they have in common is shown."""
BY_DEVICE = "loss-by-device"
"""A chart of all runs, where one evaluates per device."""
APART = ("devices", "staleness", "staleness-histogram", "contributions")
"""Charts of one run."""
EMULATED = ("cpu-over-time", "memory-over-time", "rates-over-time", "cpu", "rates")
"""Likewise; in virtual time there is nothing to measure."""
_LIVE_LANE_UPDATES = 2_000
"""Updates of a run that goes on whose work is shown in its lanes: the newest. A browser draws them
anew twice a second."""
_REFRESH_INTERVAL_SECONDS = 0.45
"""Seconds from one look at the files to the next, or where looking is dear:"""
_MAX_CPU_SHARE = 1 / 3
"""of a core at most is spent on it,"""
_MAX_TIME_SHARE = 1 / 2
"""and of the time, which is more on a busy host: those who open the page wait meanwhile."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure of the page, by a name that stays."""

    name: str
    column: int | None
    """Which run's it is; None: all runs'."""
    chart: Chart

    @property
    def shown(self) -> bool:
        """Whether there is something to look at."""
        return not self.chart.bare


class Board:
    def __init__(self, feeds: Sequence[Feed]) -> None:
        self.feeds = tuple(feeds)
        self.generation = -1
        """Grows with every new `panels`, as do the next ones."""
        self.panels: tuple[Panel, ...] = ()
        self.tables: tuple[Table, ...] = ()
        """Of the devices; one per column."""
        self.marks: tuple[ActionMarks, ...] = ()
        """What the numbers on the charts of each column stand for; then, of several runs, what those on
        the charts of all of them do."""
        self._due = 0.0

    @property
    def runs(self) -> tuple[Run, ...]:
        """Empty until all have begun."""
        found = tuple(feed.run for feed in self.feeds if feed.run is not None)
        return found if len(found) == len(self.feeds) else ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the runs: what tells them apart."""
        return tuple(distinct(self.runs))

    @property
    def columns(self) -> range:
        """Of the runs that are shown one by one."""
        return range(len(self.feeds) if len(self.feeds) <= MAX_COLUMNS else 0)

    @property
    def tasks(self) -> Mapping[str, Sequence[Run]]:
        """The runs by what they learn: others cannot be compared."""
        return comparison.by_task(self.runs)

    def refresh(self, *, at_once: bool = False) -> None:
        """Bring `panels` up to date, if it is time to (or `at_once`), and there is something new."""
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
        self.panels = tuple(self._panels(runs))
        charts = {panel.name: panel.chart for panel in self.panels}
        self.tables = tuple(
            device_table.table(runs[column], charts[f"devices-{column}"], live=self.feeds[column].live)
            for column in self.columns
        )
        together = [runs] if len(runs) > 1 else []
        self.marks = tuple(marks(own) for own in (*([runs[c]] for c in self.columns), *together))

    def _panels(self, runs: Sequence[Run]) -> Iterator[Panel]:
        apart = bool(self.columns)
        yield Panel("accuracy", None, curves(runs, "accuracy", "time", apart=apart))
        yield Panel("loss", None, curves(runs, "loss", "time", apart=apart))
        if any(map(_evaluates_by_device, runs)):
            yield Panel(BY_DEVICE, None, CHARTS[BY_DEVICE](runs))
        if not apart:
            yield Panel("time-to-accuracy", None, CHARTS["time-to-accuracy"](runs))
        names = self.names if len(runs) > 1 else ("",)
        for column in self.columns:
            feed, run = self.feeds[column], runs[column]
            simulated = is_simulated(run.manifest.get("runtime"))
            for name in APART if simulated else (*APART, *EMULATED):
                made = chart(name, feed, run)
                title = " · ".join(filter(None, (made.title, names[column])))
                yield Panel(f"{name}-{column}", column, replace(made, title=title))


def _evaluates_by_device(run: Run) -> bool:
    """By its topology: the figures of a page are there from its beginning."""
    evaluate = run.topology.get("evaluate")
    return isinstance(evaluate, dict) and bool(evaluate.get("devices"))


def chart(name: str, feed: Feed, run: Run) -> Chart:
    """One run's. What is left out of it is said below its title."""
    if name == "devices":
        chart = lanes([run], _LIVE_LANE_UPDATES) if feed.live else lanes([run])
        # The axis of time begins where what is drawn does: a fixed beginning would be set anew with
        # every update, and undo what a visitor has zoomed to.
        return replace(chart, x=replace(chart.x, limits=(None, None)))
    chart = CHARTS[name]([run])
    if name == "cpu" and feed.live:
        return chart.with_note(
            f"used in the last {CPU_WINDOW_SECONDS:.0f} s: a device that waits uses less than its share"
        )
    if name in EMULATED and feed.held_samples < feed.samples and not feed.live:
        return chart.with_note(f"the newest {feed.held_samples:,} of {feed.samples:,} samples")
    if name in APART and feed.held < feed.updates:
        return chart.with_note(f"the newest {feed.held:,} of {feed.updates:,} updates")
    return chart
