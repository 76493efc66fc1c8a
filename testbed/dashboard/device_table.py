"""The devices of a run as a table: what each has done, and uses. Of many, their groups and some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np
import pandas as pd

from analysis.charts.chart import Chart
from analysis.load import Run
from testbed.dashboard.live_fidelity import CPU_WINDOW_SECONDS, requested_cpu
from testbed.traits import is_simulated
from testbed.watching.screen import rate

MAX_ROWS = 40
"""Devices up to which all are shown. Of more there are rows for their groups, and:"""
SOME_ROWS = 15
"""devices, the first ones in the order that a visitor chooses."""
_STATE_SECONDS = 1.5
"""What a device did so long ago at most, it does now: telemetry has a sample per second."""
SORTS: Mapping[str, tuple[str, bool]] = {
    "as planned": ("", True),
    "fewest updates": ("updates", True),
    "most updates": ("updates", False),
    "most stale": ("staleness", False),
    "most CPU": ("used", False),
    "most memory": ("memory", False),
}
"""Column, and whether the lowest come first."""


@dataclass(frozen=True, slots=True)
class Table:
    devices: pd.DataFrame
    """By name, in the order of the plan: `group`, `state`, `updates`, mean `staleness` (versions),
    `share` of all updates (0 to 1), `asked` and `used` (of a core), `memory` and `limit` (bytes), `up`
    and `down` (bit/s), `up_carried` and `down_carried` (share of its rate that a link carried while
    packets waited). NaN is what is not known."""
    live: bool
    """`used`, `up` and `down` are those of the last seconds, `memory` the newest; of a run that is over
    they are means of all of it, and the most memory."""

    @property
    def caption(self) -> str:
        if self.devices["used"].isna().all():
            return "Devices"
        when = f"of the last {CPU_WINDOW_SECONDS:.0f} s" if self.live else "means of the run"
        return f"Devices (CPU and rates: {when}; memory: {'now' if self.live else 'the most'})"


def table(run: Run, lanes: Chart, *, live: bool) -> Table:
    """Of the updates and the telemetry that are held. `lanes`: the run's chart of what devices did."""
    planned = run.devices.set_index(run.devices["device"].astype(str))
    updates = run.updates.groupby(run.updates["client"].astype(str))["staleness"]
    used = _used(run, CPU_WINDOW_SECONDS if live else np.inf)
    count = updates.size().reindex(planned.index, fill_value=0)
    found = pd.DataFrame(
        {
            "group": planned["group"].astype(str),
            "state": _states(run, lanes, planned.index) if live else "",
            "updates": count,
            "staleness": updates.mean().reindex(planned.index),
            "share": count / max(1, count.sum()),
            "asked": requested_cpu(run).reindex(planned.index),
            "used": used["cpu"].reindex(planned.index),
            "memory": _memory(run, live=live).reindex(planned.index),
            "limit": planned["memory"],
            "up": 8 * used["sent"].reindex(planned.index),
            "down": 8 * used["received"].reindex(planned.index),
            "up_carried": (used["up_left"] / used["up_allowed"]).reindex(planned.index),
            "down_carried": (used["down_left"] / used["down_allowed"]).reindex(planned.index),
        },
        index=planned.index,
    )
    return Table(found, live)


def groups(devices: pd.DataFrame) -> pd.DataFrame:
    """A row like those of `Table.devices` for each group, `fast ×500`: sums of updates and shares, else
    means over the devices; the state is how many there are."""
    rows = {}
    for group, own in devices.groupby("group", sort=False):
        mean = own.mean(numeric_only=True)
        away = int((own["state"] == "offline").sum())
        stale = (own["staleness"] * own["updates"]).sum()
        rows[f"{group} ×{len(own)}"] = {
            **mean,
            "group": group,
            "state": f"{away} offline" if away else "",
            "updates": own["updates"].sum(),
            "staleness": stale / own["updates"].sum() if own["updates"].sum() else np.nan,
            "share": own["share"].sum(),
        }
    return pd.DataFrame.from_dict(rows, orient="index", columns=[*devices.columns])


def chosen(devices: pd.DataFrame, sort: str, matching: str) -> pd.DataFrame:
    """Those with `matching` in their name, group or state, in an order of `SORTS`; unknown ones last."""
    wanted = matching.casefold().strip()
    if wanted:
        texts = devices.index + " " + devices["group"] + " " + devices["state"]
        devices = devices[[wanted in text.casefold() for text in texts]]
    column, ascending = SORTS[sort]
    if not column:
        return devices
    return devices.sort_values(column, ascending=ascending, kind="stable", na_position="last")


def cells(devices: pd.DataFrame, *, grouped: bool = False) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of text; what is known of no device is left out. `grouped`: of `groups`."""
    shown = {
        **({} if grouped else {"device": [*devices.index]}),
        "group": [*(devices.index if grouped else devices["group"])],
        "state": [*devices["state"]],
        "updates": [f"{int(value):,}" for value in devices["updates"]],
        "share": [_text(value, "{:.1%}") for value in devices["share"]],
        "mean staleness": [_text(value, "{:.1f}") for value in devices["staleness"]],
        "CPU requested": [_text(value, "{:.1%}") for value in devices["asked"]],
        "CPU used": [_text(value, "{:.1%}") for value in devices["used"]],
        "memory (MiB)": [_text(value / 2**20, "{:,.0f}") for value in devices["memory"]],
        "memory limit (MiB)": [_text(value / 2**20, "{:,.0f}") for value in devices["limit"]],
        "up (bit/s)": [rate(value) for value in devices["up"]],
        "down (bit/s)": [rate(value) for value in devices["down"]],
        "up while queued": [_text(value, "{:.1%}") for value in devices["up_carried"]],
        "down while queued": [_text(value, "{:.1%}") for value in devices["down_carried"]],
    }
    if all(value == "–" for value in shown["memory (MiB)"]):
        del shown["memory limit (MiB)"]
    kept = {
        name: values
        for name, values in shown.items()
        if name in ("device", "updates") or any(value not in ("", "–") for value in values)
    }
    return [*kept], [list(row) for row in zip(*kept.values(), strict=True)]


def _text(value: float, form: str) -> str:
    return "–" if isnan(value) else form.format(value)


def _used(run: Run, seconds: float) -> pd.DataFrame:
    """`cpu`, `sent` and `received`, and what links carried and could have carried while packets waited,
    per second of device time, over the last `seconds`."""
    carried = [f"{way}_{what}" for way in ("up", "down") for what in ("left", "allowed")]
    samples = run.telemetry[["device", "at", "cpu", "sent", "received", *carried]]
    samples = samples[samples["at"] >= max(0.0, float(samples["at"].max()) - seconds)]
    names = samples["device"].astype(str)
    grown = samples.drop(columns="device").groupby(names).diff()
    grown = grown[(grown["cpu"] >= 0) & (grown["at"] > 0)]  # not over a start of the device
    total = grown.groupby(names[grown.index]).sum(min_count=1)
    return total.div(total["at"], axis=0)


def _memory(run: Run, *, live: bool) -> pd.Series[float]:
    samples = run.telemetry[run.telemetry["at"] >= 0]
    grouped = samples.groupby(samples["device"].astype(str))["memory"]
    return grouped.last() if live else grouped.max()


def _states(run: Run, lanes: Chart, devices: Sequence[str] | pd.Index) -> list[str]:
    """What each does now, as far as anybody knows: the work for an update is known once that is
    applied; until then its telemetry tells whether a device works, and in virtual time nothing does."""
    (spans,) = (layer.columns for layer in lanes.layers if layer.mark == "spans")
    newest = spans["end"] >= run.duration - _STATE_SECONDS
    states = dict(zip(spans["device"][newest], spans["state"][newest], strict=True))
    simulated = is_simulated(run.manifest.get("runtime"))
    found = []
    for device in devices:
        state = states.get(device, "")
        if state not in ("offline", "paused"):
            state = "online" if simulated else "working" if state else "waiting"
        found.append(state)
    return found
