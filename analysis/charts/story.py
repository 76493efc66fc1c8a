"""Runs of one fleet beside each other: accuracy against device time, beneath it what devices did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from analysis.charts import progress
from analysis.charts.chart import COLORS, Axis, Chart, Layer, arrays, color
from analysis.load import Run
from analysis.names import alike
from analysis.summary import is_valid
from analysis.timeline import BUSY, timeline

_SHADES = {"train": 1.0, "download": 0.35, "upload": 0.35, "paused": 0.5, "offline": 0.5}
"""Of a strip's colour, but for what the device is not to blame for, which is grey."""
_LANE = 0.022
"""Height of a device's lane, in times of a usual chart's; of a strip at least 0.1, at most 0.5."""


def story(runs: Sequence[Run]) -> list[Chart]:
    """The accuracy of `runs`, then a strip for each set of those that differ in nothing but their seed:
    of the first of them a lane per device. For `paper.stack`: their x axes are the same."""
    sets = alike(runs)
    longest = max((run.duration for run in runs), default=0.0)
    time = Axis("device time", "s", limits=(0.0, longest or None))
    curves = progress.accuracy(runs)
    if not any(run.evaluations["accuracy"].notna().any() for run in runs):
        curves = progress.loss(runs)
    layers = tuple(layer for layer in curves.layers if layer.mark != "rules")
    strips = [
        replace(_strip(_titled(name, same), same[0], color(index)), x=time)
        for index, (name, same) in enumerate(sets.items())
    ]
    note = "lanes below: training (full colour), download and upload (pale) of updates that were applied"
    return [replace(curves, x=time, layers=layers, height=0.85, note=note), *strips]


def _titled(name: str, runs: Sequence[Run]) -> str:
    """The name of a set, and whether it can be believed."""
    doubtful = sum(not is_valid(run) for run in runs)
    return f"{name} (not valid: {doubtful} of {len(runs)} runs)" if doubtful else name


def _strip(name: str, run: Run, hue: str) -> Chart:
    spans = timeline(run)
    spans = spans[spans["state"] != "wait"]
    lanes = len(spans["device"].cat.categories)
    return Chart(
        name,
        Axis("device time", "s"),
        Axis("", limits=(lanes - 0.5, -0.5)),
        (_lanes(spans, hue),),
        height=float(np.clip(_LANE * lanes, 0.1, 0.5)),
    )


def _lanes(spans: pd.DataFrame, hue: str) -> Layer:
    states = spans["state"].astype(str)
    away = ~states.isin(BUSY)
    columns = arrays(
        y=spans["device"].cat.codes,
        height=np.full(len(spans), 0.8),
        begin=spans["begin"],
        end=spans["end"],
        color=np.where(away, COLORS.index("grey"), COLORS.index(hue)),
        shade=states.map(_SHADES).to_numpy(np.float64),
        device=spans["device"].astype(str),
        state=states,
    )
    hover = {"device": "device", "state": "state", "from (s)": "begin", "to (s)": "end"}
    return Layer("devices", "spans", columns, color=hue, legend=False, hover=hover)
