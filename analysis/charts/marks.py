"""What was done to devices, as vertical marks on an axis of time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from agents.device_actions import SetCpu, SetLink, from_json, name_of
from analysis.charts.chart import Chart, Layer, arrays
from analysis.load import Run

_MAX_MARKS = 30
"""Marks; more would hide what they mark."""
_LABELLED = 12
"""Marks that are labelled; of more only the lines are drawn, and a screen tells what they are."""
_KINDS, _NAMED = 4, 2
"""Kinds of action that a mark tells, and devices that it names for each; of more it tells the count."""
_UNITS = {"up": (1e-3, " kbit/s"), "down": (1e-3, " kbit/s"), "rtt": (1e3, " ms"),
          "jitter": (1e3, " ms"), "loss": (100.0, "%")}  # fmt: skip
"""Of links: what to multiply with, and the unit then."""


def marked(chart: Chart, runs: Sequence[Run], since: float = 0.0) -> Chart:
    """`chart`, whose x axis is device time, with marks for what was done to devices from `since` on.

    Actions of the same second share a mark, at the first of them; where that makes more than 30 marks,
    those of the same 2, 4, 8, … seconds. A link that follows a trace changes twice a second: that is not
    marked. The chart's note says both.
    """
    done, unmarked = [], 0
    for run in runs:
        traced = _traced(run)
        acted = run.scenario.loc[run.scenario["at"] >= since, ["at", "device", "source", "details"]]
        for at, device, source, details in acted.itertuples(index=False):
            words = in_words(details)
            if device in traced and source == "scenario" and words.startswith("link "):
                unmarked += 1
            else:
                done.append((at, words, device))
    done.sort(key=lambda one: one[0])
    times, width = np.array([at for at, *_ in done]), 1
    while len(np.unique(times // width)) > _MAX_MARKS:
        width *= 2
    found: dict[float, dict[str, dict[str, None]]] = {}
    first: dict[float, float] = {}
    for at, words, device in done:
        place = first.setdefault(at // width, at)
        found.setdefault(place, {}).setdefault(words, {})[device] = None
    labels = [_label(actions) for actions in found.values()]
    columns = arrays(
        x=np.array(list(found), np.float64),
        what=np.array(labels, str),
        label=np.array(labels if len(labels) <= _LABELLED else [""] * len(labels), str),
    )
    layer = Layer("scenario", "rules", columns, color="grey", legend=False, hover={"scenario": "what"})
    return replace(chart, layers=(*chart.layers, layer)).noted(*_notes(width, unmarked))


def _notes(width: int, unmarked: int) -> Iterator[str]:
    if width > 1:
        yield f"each vertical mark stands for up to {width} s of the scenario"
    if unmarked:
        yield f"{unmarked:,} link changes from traces are not marked"


def _traced(run: Run) -> set[str]:
    """Devices whose link follows a trace."""
    groups = run.topology.get("devices") or ()
    traced = [group["name"] for group in groups if (group.get("link") or {}).get("trace")]
    return set(run.devices.loc[run.devices["group"].isin(traced), "device"])


def _label(actions: Mapping[str, Mapping[str, None]]) -> str:
    """`crash pi-1; link up 100 kbit/s 4 devices`."""
    words_shown = []
    for words, devices in list(actions.items())[:_KINDS]:
        named = ", ".join(devices) if len(devices) <= _NAMED else f"{len(devices)} devices"
        words_shown.append(f"{words} {named}")
    more = [f"and {len(actions) - _KINDS} more"] if len(actions) > _KINDS else []
    return "; ".join([*words_shown, *more])


@lru_cache(4096)
def in_words(details_json: str) -> str:
    """What `Run.scenario`'s `details` tell: `crash`, `link up 100 kbit/s`."""
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
