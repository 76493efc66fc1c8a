"""Chart of the effective importance q̃ of each device against its planned importance p, with χ² below
the title."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis import metrics
from analysis.charts.chart import Axis, Chart, Layer, arrays, color, group_ticks
from analysis.load import Run
from analysis.names import by_settings


def contributions(runs: Sequence[Run]) -> Chart:
    """A point per device for q̃, a line for p. For a single run, each group has a colour; for several,
    each set of runs that differ only in their seed."""
    tables = {id(run): _table(run) for run in runs}
    largest = max(tables.values(), key=len, default=pd.DataFrame(columns=["importance", "group"]))
    layers = [_planned(largest)]  # compared runs usually have the same plan
    sets = by_settings(runs)
    for index, (label, same) in enumerate(sets.items()):
        offset = 0.6 * (index - (len(sets) - 1) / 2) / len(sets)
        table = pd.concat([tables[id(run)] for run in same])
        series = table["group"] if len(runs) == 1 else pd.Series(label, table.index)
        for name, own in table.groupby(series, sort=False):
            layers.append(_points(str(name), own, offset, color(len(layers) - 1)))
    notes = [_note(run) for run in runs]
    if len(runs) > 1:
        notes = [f"χ² {metrics.bias(same[0]).chi_square:.3g} ({name})" for name, same in sets.items()]
    return Chart(
        "Contributions against importance",
        Axis("", ticks=group_ticks([*largest.index], [*largest["group"]], 10)),
        Axis("effective importance q̃", "%", limits=(0.0, None)),
        tuple(layers),
        note=", ".join(notes),
    )


def _table(run: Run) -> pd.DataFrame:
    table = metrics.contributions(run)
    return table.assign(x=np.arange(len(table)), group=table["group"].fillna("no group").astype(str))


def _planned(table: pd.DataFrame) -> Layer:
    edges = np.arange(len(table) + 1) - 0.5
    importance = 100 * table["importance"].to_numpy(np.float64)
    columns = arrays(x=edges, y=np.append(importance, importance[-1:] if len(table) else np.nan))
    return Layer("importance p", "step", columns, color="grey", reference=True)


def _points(name: str, own: pd.DataFrame, offset: float, colour: str) -> Layer:
    columns = arrays(
        x=own["x"] + offset,
        y=100 * own["effective"],
        device=own.index.astype(str),
        importance=100 * own["importance"],
        updates=own["updates"],
        share=100 * own["share"],
    )
    hover = {"device": "device", "effective (%)": "y", "importance (%)": "importance",
             "updates": "updates", "share of updates (%)": "share"}  # fmt: skip
    return Layer(name, "points", columns, color=colour, hover=hover)


def _note(run: Run) -> str:
    bias, table = metrics.bias(run), metrics.contributions(run)
    note = f"χ² = {bias.chi_square:.3g}, Jain's index {metrics.jain(table['effective']):.3g}"
    return note + (
        f", {bias.missed:.1%} of the importance without any update" if bias.missed > 0 else ""
    )
