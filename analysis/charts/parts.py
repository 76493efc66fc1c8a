"""Evaluations by part: accuracy by class or by group of devices, losses by device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import pandas as pd

from agents.texts import quantity
from analysis import metrics
from analysis.charts.action_marks import with_actions
from analysis.charts.chart import COLORS, Axis, Chart, Layer, arrays, color
from analysis.load import Run
from analysis.names import by_settings, distinct

_MAX_LINES = 2 * len(COLORS)
"""Parts (classes or groups) with a line each. Each colour has a solid and a dashed line."""
_PLURALS = {"class": "classes", "group": "groups"}


def accuracy(runs: Sequence[Run], by: Literal["class", "group"]) -> Chart:
    """Only of runs that evaluate by part (`evaluate: {classes: true}` or `{devices: 200}`).

    If all runs differ only in their seed, and there are at most `_MAX_LINES` parts, each run has a line
    per part. Otherwise each set of runs that differ only in their seed has two lines, averaged over its
    runs: a solid one for the mean over the parts, and a dashed one for the lowest part.
    """
    tables = {id(run): 100 * metrics.accuracy_by(run, by) for run in runs}
    sets = {
        name: kept
        for name, same in by_settings(runs).items()
        if (kept := [run for run in same if len(tables[id(run)])])
    }
    parts = list(dict.fromkeys(str(name) for table in tables.values() for name in table.columns))
    names = {id(run): name for name, run in distinct(runs).items()}
    apart = len(sets) == 1 and len(parts) <= _MAX_LINES
    layers: list[Layer] = []
    for index, (label, same) in enumerate(sets.items()):
        if apart:
            for run in same:
                layers += _lines(names[id(run)], tables[id(run)], parts, legend=run is same[0])
        else:
            layers += _summary(
                label, [tables[id(run)] for run in same], color(index), legend=len(sets) > 1
            )
    note = f"solid: mean over {_PLURALS[by]}, dashed: lowest; averaged over seeds"
    return Chart(
        f"Accuracy by {by}",
        Axis("device time", "s", limits=(0.0, None)),
        Axis("accuracy", "%", limits=(0.0, 100.0)),
        tuple(layers),
        note="" if apart or not sets else note,
    )


def _lines(run: str, table: pd.DataFrame, parts: Sequence[str], *, legend: bool) -> Iterator[Layer]:
    for place, part in enumerate(parts):
        if part in table:
            columns = arrays(x=table.index, y=table[part])
            hover = {"part and run": "$name", "accuracy (%)": "y", "device time (s)": "x"}
            yield Layer(
                f"{part}, {run}",
                "line",
                columns,
                color(place),
                label=part,
                legend=legend,
                dashed=place >= len(COLORS),
                hover=hover,
            )


def _summary(name: str, tables: Sequence[pd.DataFrame], hue: str, *, legend: bool) -> Iterator[Layer]:
    """Mean over the parts and lowest part, averaged over the runs, interpolated between evaluations, and
    constant after a run's last one."""
    grid = np.unique(np.concatenate([table.index for table in tables]))
    means = [np.interp(grid, table.index, table.mean(axis=1)) for table in tables]
    lows = [np.interp(grid, table.index, table.min(axis=1)) for table in tables]
    hover = {"runs": "$name", "accuracy (%)": "y", "device time (s)": "x"}
    yield Layer(name, "line", arrays(x=grid, y=np.mean(means, axis=0)), hue, legend=legend, hover=hover)
    columns = arrays(x=grid, y=np.mean(lows, axis=0))
    yield Layer(f"{name}, lowest", "line", columns, hue, legend=False, dashed=True, hover=hover)


def losses(runs: Sequence[Run]) -> Chart:
    """Return a chart of the losses of each run. A line shows the unweighted mean over the run's devices,
    and dashed lines show the lowest and the highest loss (Fraboni et al. 2023, FedFix, Figure 2).

    The chart has only runs that evaluate by device (`evaluate: {devices: 200}`). Runs that differ only
    in their seed have the same colour.
    """
    names = {id(run): name for name, run in distinct(runs).items()}
    layers, notes = [], []
    for index, (label, same) in enumerate(by_settings(runs).items()):
        for run in same:
            parts = run.parts[run.parts["part"] == "device"]
            known = parts.dropna(subset=["loss"])
            if lost := parts["version"].nunique() - known["version"].nunique():
                notes.append(f"{names[id(run)]}: {quantity(lost, 'evaluation')} without a finite loss")
            if known.empty:
                continue
            grouped = known.groupby("version")
            at, loss = grouped["at"].first(), grouped["loss"]
            ends = {"lowest": loss.idxmin(), "highest": loss.idxmax()}
            columns = arrays(x=at, y=loss.mean(), deviation=loss.std(ddof=0), version=at.index)
            hover = {"run": "$name", "mean loss": "y", "standard deviation": "deviation",
                     "version": "version", "device time (s)": "x"}  # fmt: skip
            own = names[id(run)]
            shown = len(runs) > 1 and run is same[0]
            layers.append(
                Layer(own, "line", columns, color(index), label=label, legend=shown, hover=hover)
            )
            for end, places in ends.items():
                name, chosen = f"{own}, {end}", run.parts.loc[places]
                columns = arrays(x=at, y=chosen["loss"], device=chosen["name"].astype(str))
                hover = {"device": "device", f"{end} loss": "y", "device time (s)": "x"}
                line = Layer(name, "line", columns, color(index), legend=False, dashed=True, hover=hover)
                layers.append(line)
            if len(runs) == 1:
                last = loss.std(ddof=0).iloc[-1]
                notes.append(f"standard deviation over the devices at the end: {last:.3g}")
    chart = Chart(
        "Loss of the global model by device: mean, lowest and highest",
        Axis("device time", "s", limits=(0.0, None)),
        Axis("loss on the device's data", limits=(0.0, None)),
        tuple(layers),
        note="; ".join(notes),
    )
    return with_actions(chart, runs)
