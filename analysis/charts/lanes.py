"""State of each device over time: one lane per device, coloured by state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.charts.action_marks import with_actions
from analysis.charts.chart import COLORS, Axis, Chart, Column, Layer, arrays, group_ticks, shares_note
from analysis.device_states import STATES, timeline
from analysis.load import Run
from analysis.names import distinct

STATE_COLORS = {
    "download": "sky",
    "mask": "yellow",
    "train": "blue",
    "upload": "orange",
    "unfinished": "grey",
    "paused": "purple",
    "offline": "red",
    "unpowered": "green",
}
"""The lane of a waiting device is empty."""
MAX_UPDATES = 40_000
"""Newest updates to show, so that a browser can still scroll the chart."""
_NAMED = 40
"""Above this number of lanes, only groups have labels."""
_RECORD = ("sequence", "base_version", "applied_version", "staleness", "loss", "bytes")
_HOVER = {
    "device": "device",
    "state": "state",
    "from (s)": "begin",
    "to (s)": "end",
    **{name.replace("_", " "): name for name in _RECORD},
}
_CODES = np.array([COLORS.index(STATE_COLORS.get(state, "grey")) for state in STATES])
"""Index in `PALETTE` of each state's colour, in the order of `STATES`."""


def lanes(runs: Sequence[Run], max_updates: int = MAX_UPDATES) -> Chart:
    """Above `max_updates`, only the time of the newest updates is shown. Raises ValueError if `runs` is
    empty."""
    if not runs:
        raise ValueError("the chart of devices needs at least one run")
    parts: list[pd.DataFrame] = []
    labels: list[str] = []
    groups: list[str] = []
    arrived = np.sort(np.concatenate([run.updates["arrived"].to_numpy() for run in runs]))
    since = float(arrived[-max_updates]) if len(arrived) > max_updates else 0.0
    for name, run in distinct(runs).items():
        spans = timeline(run, since)
        spans = spans[spans["state"] != "wait"]
        devices = spans["device"].cat.categories
        parts.append(_recorded(spans, run, len(labels)))
        labels += [device if len(runs) == 1 else f"{name} · {device}" for device in devices]
        groups += [*run.devices["group"], *[""] * (len(devices) - len(run.devices))]
    shown = pd.concat(parts)
    # Gaps between thousands of lanes would flicker on a screen.
    shown = shown.assign(height=0.8 if len(labels) <= 4 * _NAMED else 1.0)
    states = {*shown["state"].unique()}
    columns = _columns(shown)
    notes = ("gaps: waiting", f"the newest {max_updates:,} updates" * bool(since))
    chart = Chart(
        "What the devices did",
        Axis("device time", "s", limits=(since, None)),
        Axis("", ticks=group_ticks(labels, groups, _NAMED), limits=(len(labels) - 0.5, -0.5)),
        (Layer("devices", "spans", columns, legend=False, hover=_HOVER),),
        legend={state: color for state, color in STATE_COLORS.items() if state in states},
        height=float(np.clip(len(labels) / 16, 0.6, 3.0)),
    )
    return with_actions(chart.with_note(*notes, shares_note(columns)), runs, since)


def _columns(shown: pd.DataFrame) -> dict[str, Column]:
    columns = {name: shown[name].to_numpy() for name in ("y", "height", "begin", "end", *_RECORD)}
    named = {name: shown[name].astype(str).to_numpy(str) for name in ("device", "state")}
    return arrays(**columns, **named, color=_CODES[shown["state"].cat.codes])


def _recorded(spans: pd.DataFrame, run: Run, first: int) -> pd.DataFrame:
    """Add the number of the span's lane, from `first`, and the fields of its update; −1 or NaN without
    one."""
    row = spans["update"].to_numpy()
    columns = {
        name: np.append(run.updates[name].to_numpy(), np.nan if name == "loss" else -1)[row]
        for name in _RECORD
    }
    return spans.assign(y=spans["device"].cat.codes + first, **columns)
