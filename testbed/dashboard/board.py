"""The charts and the device table of a set of runs, computed once for all visitors."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any

import numpy as np
import pandas as pd

from analysis import comparison
from analysis.charts import CHARTS, PAGE_CHARTS
from analysis.charts.action_marks import ActionMarks, marks
from analysis.charts.chart import Chart, remarks
from analysis.charts.lanes import lanes
from analysis.charts.learning_curves import curves
from analysis.features import NEEDS
from analysis.figures import FIGURES
from analysis.load import Run
from analysis.names import distinct
from analysis.part import DeviceFigure, rate
from testbed.dashboard.feed import CPU_WINDOW_SECONDS, Feed, requested_cpu
from testbed.traits import is_simulated

MAX_ROWS = 40
"""Above this number of devices, the table shows the groups and `SOME_ROWS` devices."""
SOME_ROWS = 15
"""These are the first ones in the order that the visitor chooses."""
_STATE_SECONDS = 1.5
"""Maximum age of a state that is shown as the present one. Telemetry has one sample per second."""
SORTS: Mapping[str, tuple[str, bool]] = {
    "as planned": ("", True),
    **{
        name: (figure.name, ascending)
        for figure in FIGURES.values()
        for name, ascending in figure.orders.items()
    },
}
"""Name of an order -> column to sort by, and whether the order is ascending."""


def sorts(have: Collection[str]) -> Iterator[str]:
    """Yield the orders that are offered for runs that have `have` (`analysis.features.parts_of_run`)."""
    for name, (column, _) in SORTS.items():
        needs = FIGURES[column].needs if column else ""
        if needs not in NEEDS or needs in have:
            yield name


def _shown() -> Mapping[str, DeviceFigure]:
    return {name: figure for name, figure in FIGURES.items() if figure.heading}


@dataclass(frozen=True, slots=True)
class DeviceTable:
    devices: pd.DataFrame
    """One row per device, in the order of the plan, indexed by name: `group`, `state`, `updates`, mean
    `staleness` (versions), `share` of all updates (0 to 1), `asked` (requested) and `used` CPU (share of
    a core), `memory` (bytes), its `limit_mib`, `up` and `down` (bit/s), `up_carried` and `down_carried`
    (share of the link's rate that was carried while packets waited), and the figures with a `table`. NaN
    if unknown."""
    live: bool
    """If true, `used`, `up` and `down` are means over the last seconds, and `memory` is the latest
    value; else means and maximum over the run."""

    @property
    def caption(self) -> str:
        when = {name: one.when[not self.live] for name, one in _shown().items() if any(one.when)}
        known = [f"{name}: {text}" for name, text in when.items() if self.devices[name].notna().any()]
        if self.devices["used"].notna().any():
            last = f"last {CPU_WINDOW_SECONDS:.0f} s" if self.live else "means of the run"
            known = [f"CPU and rates: {last}", f"memory: {'now' if self.live else 'maximum'}"]
        return f"Devices ({'; '.join(known)})" if known else "Devices"


def device_table(run: Run, lanes: Chart, *, live: bool) -> DeviceTable:
    """`lanes`: the run's chart of device states."""
    planned = run.devices.set_index(run.devices["device"].astype(str))
    updates = run.updates.groupby(run.updates["client"].astype(str))["staleness"]
    used = _used(run, CPU_WINDOW_SECONDS if live else np.inf)
    count = updates.size().reindex(planned.index, fill_value=0)
    figures = pd.DataFrame(
        {
            "group": planned["group"].astype(str),
            "state": _states(run, lanes, planned.index) if live else "",
            "updates": count,
            "staleness": updates.mean().reindex(planned.index),
            "share": count / max(1, count.sum()),
            "asked": requested_cpu(run).reindex(planned.index),
            "used": used["cpu"].reindex(planned.index),
            "memory": _memory(run, live=live).reindex(planned.index),
            # A real device has no limit.
            "limit_mib": planned["memory"].where(planned["memory"] > 0) / 2**20,
            "up": 8 * used["sent"].reindex(planned.index),
            "down": 8 * used["received"].reindex(planned.index),
            "up_carried": (used["up_left"] / used["up_allowed"]).reindex(planned.index),
            "down_carried": (used["down_left"] / used["down_allowed"]).reindex(planned.index),
            **{
                one.name: one.table(run, live).reindex(planned.index)
                for one in FIGURES.values()
                if one.table
            },
        },
        index=planned.index,
    )
    return DeviceTable(figures, live)


def group_rows(devices: pd.DataFrame) -> pd.DataFrame:
    """Return one row per group, with the columns of `DeviceTable.devices` and a name such as `fast
    ×500`. The `state` of a row is the number of the group's devices that are offline or unpowered."""
    rows = {}
    for group, own in devices.groupby("group", sort=False):
        away = own["state"][own["state"].isin(["offline", "unpowered"])].value_counts()
        updates = [*own["updates"]]
        rows[f"{group} ×{len(own)}"] = {
            **own.mean(numeric_only=True),
            **{name: one.group([*own[name]], updates) for name, one in _shown().items()},
            "group": group,
            "state": ", ".join(f"{count} {state}" for state, count in sorted(away.items())),
        }
    return pd.DataFrame.from_dict(rows, orient="index", columns=[*devices.columns])


def select_rows(devices: pd.DataFrame, sort: str, matching: str) -> pd.DataFrame:
    """`matching`: text in name, group or state. `sort`: of `SORTS`; unknown figures come last."""
    pattern = matching.casefold().strip()
    if pattern:
        texts = devices.index + " " + devices["group"] + " " + devices["state"]
        devices = devices[[pattern in text.casefold() for text in texts]]
    column, ascending = SORTS[sort]
    if not column:
        return devices
    return devices.sort_values(column, ascending=ascending, kind="stable", na_position="last")


def device_cells(devices: pd.DataFrame, *, grouped: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of cells, without columns in which nothing is known. `grouped`: whether
    `devices` comes from `group_rows`."""
    shown = {
        **({} if grouped else {"device": [*devices.index]}),
        "group": [*(devices.index if grouped else devices["group"])],
        "state": [*devices["state"]],
    }
    for name, figure in _shown().items():
        shown[figure.heading] = [figure.page_text(value) for value in devices[name]]
        for column, (heading, form) in _BESIDE.get(name, {}).items():
            shown[heading] = [_text(value, form) for value in devices[column]]
    if all(value == "–" for value in shown["memory (MiB)"]):
        del shown["memory limit (MiB)"]
    columns = {
        name: values
        for name, values in shown.items()
        if name in ("device", "updates") or any(value not in ("", "–") for value in values)
    }
    return [*columns], [list(row) for row in zip(*columns.values(), strict=True)]


def real_cells(manifest: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of the measured figures of real devices; no rows if all are emulated."""
    found = manifest.get("real")
    figures = {} if not isinstance(found, dict) else found
    rows = []
    for device, one in figures.items():
        if not isinstance(one, dict):
            continue
        known = {key: value for key, value in one.items() if isinstance(value, int | float)}
        step, up, down, rtt, clock, other = (
            known.get(key, nan) for key in ("step", "up", "down", "rtt", "clock", "foreign")
        )
        rows.append(
            [
                str(device),
                str(one.get("host")),
                _text(1e3 * step, "{:.3g}"),
                rate(up),
                rate(down),
                _text(1e3 * rtt, "{:.3g}"),
                _text(1e3 * clock, "±{:.2g}"),
                _text(other, "{:.0%}"),
            ]
        )
    headings = ["device", "host", "step (ms)", "up (bit/s)", "down (bit/s)", "round trip (ms)"]
    return [*headings, "clock (ms)", "other work"], rows


_BESIDE: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "memory": {"limit_mib": ("memory limit (MiB)", "{:,.0f}")},
    "up": {"up_carried": ("up while queued", "{:.1%}")},
    "down": {"down_carried": ("down while queued", "{:.1%}")},
}
"""DeviceFigure -> columns beside it that only the page has, with their headings and formats."""


def _text(value: float, form: str) -> str:
    return "–" if isnan(value) else form.format(value)


def _used(run: Run, seconds: float) -> pd.DataFrame:
    """Return one row per device: the growth per second of device time, over the last `seconds`, of
    `cpu`, `sent`, `received`, and the bytes that links carried and could have carried while packets
    waited."""
    carried = [f"{way}_{what}" for way in ("up", "down") for what in ("left", "allowed")]
    samples = run.telemetry[["device", "at", "cpu", "sent", "received", *carried]]
    samples = samples[samples["at"] >= max(0.0, float(samples["at"].max()) - seconds)]
    names = samples["device"].astype(str)
    grown = samples.drop(columns="device").groupby(names).diff()
    grown = grown[(grown["cpu"] >= 0) & (grown["at"] > 0)]  # no growth across a restart of the device
    total = grown.groupby(names[grown.index]).sum(min_count=1)
    return total.div(total["at"], axis=0)


def _memory(run: Run, *, live: bool) -> pd.Series[float]:
    samples = run.telemetry[run.telemetry["at"] >= 0]
    grouped = samples.groupby(samples["device"].astype(str))["memory"]
    return grouped.last() if live else grouped.max()


def _states(run: Run, lanes: Chart, devices: Sequence[str] | pd.Index) -> list[str]:
    """The activity of a device for an update is recorded only when the update is applied. Until then,
    telemetry shows whether the device is working or waiting. In virtual time there is no telemetry:
    every device that is neither offline, unpowered nor paused is shown as `online`."""
    (spans,) = (layer.columns for layer in lanes.layers if layer.mark == "spans")
    newest = spans["end"] >= run.duration - _STATE_SECONDS
    states = dict(zip(spans["device"][newest], spans["state"][newest], strict=True))
    simulated = is_simulated(run.manifest.get("runtime"))
    result = []
    for device in devices:
        state = states.get(device, "")
        if state not in ("offline", "unpowered", "paused"):
            state = "online" if simulated else "working" if state else "waiting"
        result.append(state)
    return result


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
            device_table(runs[column], charts[f"devices-{column}"], live=self.feeds[column].live)
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
