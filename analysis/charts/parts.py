"""Accuracy over time, by class or by group of devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import pandas as pd

from analysis import metrics
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
