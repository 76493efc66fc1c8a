"""How often each device was chosen against how often it was eligible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from agents.texts import quantity
from analysis import metrics
from analysis.charts.chart import Axis, Chart, Layer, arrays, color
from analysis.load import Run
from analysis.names import by_settings


def participation(runs: Sequence[Run]) -> Chart:
    """A point per device: share of draws in which it was eligible, and share of these that chose it. The
    line is a uniform selection.

    For a single run, each group has a colour; for several, each set of runs that differ only in their
    seed. Runs without draws are left out.
    """
    layers: list[Layer] = []
    notes: list[str] = []
    for label, same in by_settings(runs).items():
        table = pd.concat([metrics.participation(run) for run in same])
        if not len(table):
            continue
        series = table["group"].fillna("no group").astype(str)
        series = series if len(runs) == 1 else pd.Series(label, table.index)
        for name, own in table.groupby(series, sort=False):
            layers.append(_points(str(name), own, color(len(layers))))
        drawn = sum(len(run.draws) for run in same)
        uniform = table["chosen"].sum() / max(1, table["eligible"].sum())
        notes.append(f"{quantity(drawn, 'draw')}, {uniform:.1%} of the eligible chosen ({label})")
        if len(runs) == 1:
            level = 100 * np.array([uniform, uniform])
            line = arrays(x=np.array([0.0, 100.0]), y=level)
            layers.append(Layer("uniform", "line", line, color="grey", reference=True))
    return Chart(
        "Participation against eligibility",
        Axis("draws in which the device was eligible", "%", limits=(0.0, None)),
        Axis("of these, draws that chose it", "%", limits=(0.0, None)),
        tuple(layers),
        note="; ".join(notes),
    )


def _points(name: str, own: pd.DataFrame, colour: str) -> Layer:
    columns = arrays(
        x=100 * own["eligible_share"],
        y=100 * own["chosen_share"],
        device=own.index.astype(str),
        eligible=own["eligible"],
        chosen=own["chosen"],
    )
    hover = {"device": "device", "eligible": "eligible", "chosen": "chosen"}
    return Layer(name, "points", columns, color=colour, hover=hover)
