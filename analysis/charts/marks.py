"""What was done to devices, as vertical marks on an axis of time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from analysis.charts.chart import Layer, arrays
from analysis.load import Run

_MOST = 30
"""Marks; more would hide what they mark."""
_LABELLED = 12
"""Marks that are labelled; of more only the lines are drawn, and a screen tells what they are."""
_NAMED = 2
"""Devices that a mark names; of more it tells the count."""
_UNITS = {"up": (1e-3, " kbit/s"), "down": (1e-3, " kbit/s"), "rtt": (1e3, " ms"),
          "jitter": (1e3, " ms"), "loss": (100.0, "%")}  # fmt: skip
"""Of links: what to multiply with, and the unit then."""


def marks(runs: Sequence[Run]) -> Layer:
    """Actions of the same second share a mark; were there more than 30, there are none."""
    found: dict[int, dict[str, dict[str, None]]] = {}
    for run in runs:
        acted = run.scenario[["at", "device", "details"]]
        for at, device, details in acted.itertuples(index=False):
            found.setdefault(round(at), {}).setdefault(_words(json.loads(details)), {})[device] = None
    times = sorted(found) if len(found) <= _MOST else []
    labels = [_label(found[at]) for at in times]
    columns = arrays(
        x=np.array(times, np.float64),
        what=np.array(labels, str),
        label=np.array(labels if len(labels) <= _LABELLED else [""] * len(labels), str),
    )
    return Layer("scenario", "rules", columns, color="grey", legend=False, hover={"scenario": "what"})


def _label(actions: Mapping[str, Mapping[str, None]]) -> str:
    """`crash pi-1; link up 100 kbit/s 4 devices`."""
    told = []
    for words, devices in actions.items():
        named = ", ".join(devices) if len(devices) <= _NAMED else f"{len(devices)} devices"
        told.append(f"{words} {named}")
    return "; ".join(told)


def _words(details: Mapping[str, object]) -> str:
    match details:
        case {"action": "set", "cpu": float() | int() as share}:
            return f"cpu {share:g}"
        case {"action": "set", "link": dict() as link}:
            return "link " + ", ".join(f"{name} {_value(name, value)}" for name, value in link.items())
    return str(details.get("action"))


def _value(name: str, value: object) -> str:
    if not isinstance(value, float | int):
        return "unlimited" if value is None else str(value)
    scale, unit = _UNITS.get(name, (1.0, ""))
    return f"{value * scale:g}{unit}"
