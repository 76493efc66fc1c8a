"""The charts of a set of runs, computed once for all who look at them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from analysis.charts import CHARTS
from analysis.charts.chart import Chart
from analysis.charts.lanes import lanes
from analysis.load import Run
from testbed.dashboard.feed import Feed
from testbed.dashboard.measured import CPU_WINDOW_SECONDS
from testbed.traits import is_simulated

OVERLAID = ("accuracy", "loss")
"""Of several runs in the same figure; the others have one for each run."""
BY_DEVICE = "loss-by-device"
"""Overlaid too, where a run evaluates per device."""
APART = ("devices", "staleness", "staleness-histogram", "contributions")
EMULATED = ("cpu", "rates")
"""In virtual time there is nothing to measure."""
_LIVE_LANE_UPDATES = 2_000
"""Updates of a run that goes on whose work is shown in its lanes: the newest. A browser draws them
anew twice a second."""
_REFRESH_INTERVAL_SECONDS = 0.45
"""Seconds from one look at the files to the next, or where looking is dear:"""
_MAX_CPU_SHARE = 1 / 3
"""of a core at most is spent on it."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure of the page, by a name that stays."""

    name: str
    column: int | None
    """Which run's it is; None: all runs'."""
    chart: Chart


class Board:
    def __init__(self, feeds: Sequence[Feed]) -> None:
        self.feeds = tuple(feeds)
        self.generation = -1
        """Grows with every new `panels`."""
        self.panels: tuple[Panel, ...] = ()
        self._due = 0.0

    @property
    def runs(self) -> tuple[Run, ...]:
        """Empty until all have begun."""
        found = tuple(feed.run for feed in self.feeds if feed.run is not None)
        return found if len(found) == len(self.feeds) else ()

    def refresh(self, *, at_once: bool = False) -> None:
        """Bring `panels` up to date, if it is time to (or `at_once`), and there is something new."""
        begin, spent = time.monotonic(), time.process_time()
        if begin < self._due and not at_once:
            return
        for feed in self.feeds:
            feed.refresh()
        generation = sum(feed.generation for feed in self.feeds)
        if generation != self.generation and self.runs:
            self.panels = tuple(self._panels(self.runs))
        self.generation = generation
        self._due = begin + max(
            _REFRESH_INTERVAL_SECONDS, (time.process_time() - spent) / _MAX_CPU_SHARE
        )

    def _panels(self, runs: Sequence[Run]) -> Iterator[Panel]:
        for name in OVERLAID:
            yield Panel(name, None, CHARTS[name](runs))
        if any(map(_evaluates_by_device, runs)):
            yield Panel(BY_DEVICE, None, CHARTS[BY_DEVICE](runs))
        for column, (feed, run) in enumerate(zip(self.feeds, runs, strict=True)):
            simulated = is_simulated(run.manifest.get("runtime"))
            for name in APART if simulated else (*APART, *EMULATED):
                yield Panel(f"{name}-{column}", column, chart(name, feed, run))


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
    if name in APART and feed.held < feed.updates:
        return chart.with_note(f"the newest {feed.held:,} of {feed.updates:,} updates")
    return chart
