"""What was done to devices, as vertical marks on an axis of time."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from analysis.charts.chart import Layer, arrays
from analysis.load import Run

_MOST = 40
"""Marks; more would hide what they mark."""
_NAMED = 2
"""Devices that a mark names; of more it tells the count."""


def marks(runs: Sequence[Run]) -> Layer:
    """Actions at the same second and of the same kind share a mark; beyond 40 there are none."""
    found: dict[tuple[int, str], list[str]] = {}
    for run in runs:
        acted = run.scenario[["at", "device", "details"]]
        for at, device, details in acted.itertuples(index=False):
            devices = found.setdefault((round(at), _words(json.loads(details))), [])
            if device not in devices:
                devices.append(device)
    shown = sorted(found) if len(found) <= _MOST else []
    labels = [f"{words} {_named(found[at, words])}" for at, words in shown]
    columns = arrays(x=np.array([float(at) for at, _ in shown]), label=np.array(labels, dtype=str))
    return Layer("scenario", "rules", columns, color="grey", legend=False, hover={"scenario": "label"})


def _words(details: dict[str, object]) -> str:
    match details:
        case {"action": "set", "cpu": float() | int() as share}:
            return f"cpu {share:g}"
        case {"action": "set", "link": dict() as link}:
            return "link " + " ".join(f"{name} {_value(value)}" for name, value in link.items())
    return str(details.get("action"))


def _value(value: object) -> str:
    return (
        "unlimited" if value is None else f"{value:g}" if isinstance(value, float | int) else str(value)
    )


def _named(devices: Sequence[str]) -> str:
    return ", ".join(devices) if len(devices) <= _NAMED else f"{len(devices)} devices"
