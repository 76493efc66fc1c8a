"""What each device did when: a lane per device, coloured by state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.charts.chart import COLORS, Axis, Chart, Layer, arrays, group_ticks
from analysis.charts.marks import marks
from analysis.load import Run
from analysis.names import distinct
from analysis.timeline import STATES, timeline

STATE_COLORS = {
    "download": "sky",
    "train": "blue",
    "upload": "orange",
    "paused": "purple",
    "offline": "red",
}
"""To wait is to leave the lane empty."""
MOST = 100_000
"""Spans that are drawn: the newest. A screen shows no more, and a browser still moves them at once."""
_NAMED = 40
"""Lanes that are named; where there are more, groups are."""
_RECORD = ("sequence", "base_version", "applied_version", "staleness", "loss", "bytes")


def lanes(runs: Sequence[Run]) -> Chart:
    parts: list[pd.DataFrame] = []
    labels: list[str] = []
    groups: list[str] = []
    for name, run in distinct(runs).items():
        spans = timeline(run)
        devices = spans["device"].cat.categories
        parts.append(_recorded(spans, run).assign(y=spans["device"].cat.codes + len(labels)))
        labels += [device if len(runs) == 1 else f"{name} · {device}" for device in devices]
        groups += [*run.devices["group"], *[""] * (len(devices) - len(run.devices))]
    shown = pd.concat(parts)
    shown = shown[shown["state"] != "wait"].sort_values("end", kind="stable")
    note = "empty: waits"
    if len(shown) > MOST:
        note += f"; the newest {MOST:,} of {len(shown):,} intervals"
    shown = shown.iloc[-MOST:]
    codes = np.array([COLORS.index(STATE_COLORS.get(state, "grey")) for state in STATES])
    columns = {name: shown[name].to_numpy() for name in ("y", "begin", "end", *_RECORD)}
    named = {name: np.asarray(shown[name], str) for name in ("device", "state")}
    color = codes[shown["state"].cat.codes]
    hover = {
        "device": "device",
        "state": "state",
        "from (s)": "begin",
        "to (s)": "end",
        **{name.replace("_", " "): name for name in _RECORD},
    }
    layer = Layer("devices", "spans", arrays(**columns, **named, color=color), legend=False, hover=hover)
    return Chart(
        "Devices",
        Axis("device time", "s", limits=(0.0, None)),
        Axis("", ticks=group_ticks(labels, groups, _NAMED), limits=(len(labels) - 0.5, -0.5)),
        (layer, marks(runs)),
        legend=STATE_COLORS,
        note=note,
        height=float(np.clip(len(labels) / 16, 0.5, 3.0)),
    )


def _recorded(spans: pd.DataFrame, run: Run) -> pd.DataFrame:
    """`spans` with what the record of their update says; −1 or NaN where there is none."""
    row = spans["update"].to_numpy()
    told = {
        name: np.append(run.updates[name].to_numpy(), np.nan if name == "loss" else -1)[row]
        for name in _RECORD
    }
    return spans.assign(device=spans["device"].astype(object), **told)
