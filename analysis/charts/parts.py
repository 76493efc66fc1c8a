"""Charts of the accuracy over time, by class or by group of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from analysis import metrics
from analysis.charts.chart import COLORS, Axis, Chart, Layer, arrays, band_of, color
from analysis.load import Run
from analysis.names import by_settings, distinct

_MAX_LINES = 2 * len(COLORS)
"""Maximum number of parts with a line of their own. There are two kinds of lines of each colour."""


def accuracy(runs: Sequence[Run], by: Literal["class", "group"]) -> Chart:
    """Return a chart of the accuracy by class or group over time. The chart has only runs that evaluate
    by part (`evaluate: {classes: true}` or `{devices: 200}`).

    Runs that differ only in their seed have a line per part and run. If there are other runs, or too
    many parts, each run has one line for the mean over its parts, and a band from lowest to highest.
    """
    tables = {id(run): 100 * metrics.accuracy_by(run, by) for run in runs}
    sets = by_settings(runs)
    parts = list(dict.fromkeys(str(name) for table in tables.values() for name in table.columns))
    names = {id(run): name for name, run in distinct(runs).items()}
    layers: list[Layer] = []
    apart = len(sets) == 1 and len(parts) <= _MAX_LINES
    for index, (label, same) in enumerate(sets.items()):
        for run in same:
            table, own = tables[id(run)], names[id(run)]
            at = table.index.to_numpy(np.float64)
            if apart:
                for place, part in enumerate(parts if len(at) else ()):
                    layers.append(
                        Layer(
                            f"{part}, {own}",
                            "line",
                            arrays(x=at, y=table[part]),
                            color(place),
                            label=part,
                            legend=run is same[0],
                            dashed=place >= len(COLORS),
                            hover={by: "$name", "accuracy (%)": "y", "device time (s)": "x"},
                        )
                    )
            elif len(at):
                ends = {"low": table.min(axis=1), "high": table.max(axis=1)}
                layers.append(
                    Layer(band_of(own), "band", arrays(x=at, **ends), color(index), legend=False)
                )
                columns = arrays(x=at, y=table.mean(axis=1), **ends)
                hover = {"run": "$name", f"mean over {_PLURALS[by]}": "y", "lowest": "low",
                         "highest": "high", "device time (s)": "x"}  # fmt: skip
                shown = run is same[0] and len(sets) > 1
                layers.append(
                    Layer(own, "line", columns, color(index), label=label, legend=shown, hover=hover)
                )
    return Chart(
        f"Accuracy by {by}",
        Axis("device time", "s", limits=(0.0, None)),
        Axis("accuracy", "%", limits=(0.0, 100.0)),
        tuple(layers),
        note="" if apart else f"line: mean over {_PLURALS[by]}, band: lowest to highest",
    )


_PLURALS = {"class": "classes", "group": "groups"}
