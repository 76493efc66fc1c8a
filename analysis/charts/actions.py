"""Actions on devices, as vertical marks on a time axis and as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice

import numpy as np

from agents.device_actions import SetCpu, SetLink, from_json, name_of
from analysis.charts.chart import Chart, Layer, arrays
from analysis.load import Run

_MAX_MARKS = 30
"""Marks; more would hide what they mark."""
_LABELLED = 12
"""Marks up to which all are labelled; of more only the lines are drawn, with tooltips on the screen."""
_KINDS, _NAMED = 4, 2
"""Kinds of action that a label lists, and devices that it names for each; of more it has the count."""
_UNITS = {"up": (1e-3, " kbit/s"), "down": (1e-3, " kbit/s"), "rtt": (1e3, " ms"),
          "jitter": (1e3, " ms"), "loss": (100.0, "%")}  # fmt: skip
"""Of a link's fields: what to multiply the value by, and the unit of the product."""


def with_actions(chart: Chart, runs: Sequence[Run], since: float = 0.0) -> Chart:
    """`chart`, whose x axis is device time, with vertical marks for the actions from `since` on.

    Actions of the same second share a mark, at the first of them; where that makes more than 30 marks,
    those of the same 2, 4, 8, … seconds. A link that follows a trace changes twice a second: that is not
    marked. The chart's note mentions both.
    """
    marked, unmarked = [], 0
    for run in runs:
        traced = _traced(run)
        actions = run.scenario.loc[run.scenario["at"] >= since, ["at", "device", "source", "details"]]
        for at, device, source, details in actions.itertuples(index=False):
            action = describe(details)
            if device in traced and source == "scenario" and action.startswith("link "):
                unmarked += 1
            else:
                marked.append((at, action, device))
    marked.sort(key=lambda one: one[0])
    times, width_s = np.array([at for at, *_ in marked]), 1
    while len(np.unique(times // width_s)) > _MAX_MARKS:
        width_s *= 2
    marks: dict[float, dict[str, dict[str, None]]] = {}
    first: dict[float, float] = {}
    for at, action, device in marked:
        position = first.setdefault(at // width_s, at)
        marks.setdefault(position, {}).setdefault(action, {})[device] = None
    labels = [_label(devices_by_action) for devices_by_action in marks.values()]
    columns = arrays(
        x=np.array(list(marks), np.float64),
        what=np.array(labels, str),
        label=np.array(labels if len(labels) <= _LABELLED else [""] * len(labels), str),
    )
    layer = Layer("scenario", "rules", columns, color="grey", legend=False, hover={"scenario": "what"})
    grouped = f"each vertical mark stands for up to {width_s} s of the scenario" if width_s > 1 else ""
    omitted = f"{unmarked:,} link changes from traces are not marked" if unmarked else ""
    return replace(chart, layers=(*chart.layers, layer)).with_note(grouped, omitted)


def _traced(run: Run) -> set[str]:
    """Devices whose link follows a trace."""
    groups = run.topology.get("devices") or ()
    traced = [group["name"] for group in groups if (group.get("link") or {}).get("trace")]
    return set(run.devices.loc[run.devices["group"].isin(traced), "device"])


def _label(devices_by_action: Mapping[str, Mapping[str, None]]) -> str:
    """`crash pi-1; link up 100 kbit/s 4 devices`."""
    parts = []
    for action, devices in islice(devices_by_action.items(), _KINDS):
        names = ", ".join(devices) if len(devices) <= _NAMED else f"{len(devices)} devices"
        parts.append(f"{action} {names}")
    if len(devices_by_action) > _KINDS:
        parts.append(f"and {len(devices_by_action) - _KINDS} more")
    return "; ".join(parts)


@lru_cache(4096)
def describe(details_json: str) -> str:
    """The action of a row of `Run.scenario`, given its `details`: `crash`, `link up 100 kbit/s`."""
    details = json.loads(details_json)
    match from_json(details):
        case None:
            return str(details.get("action"))
        case SetCpu(share):
            return f"cpu {share:g}"
        case SetLink(changes):
            return "link " + ", ".join(
                f"{name} {_value(name, value)}" for name, value in changes.items()
            )
        case action:
            return name_of(action)


def _value(name: str, value: object) -> str:
    if not isinstance(value, float | int):
        return "unlimited" if value is None else str(value)
    scale, unit = _UNITS.get(name, (1.0, ""))
    return f"{value * scale:g}{unit}"
