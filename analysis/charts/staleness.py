"""Staleness of applied updates: over time, and as a distribution.

For a single run, each group is a series; for several, each set of runs that differ only in their seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from agents.texts import quantity
from analysis.charts.action_marks import with_actions
from analysis.charts.chart import Axis, Chart, Layer, arrays, color
from analysis.load import Run
from analysis.names import by_settings

_MAX_POINTS = 10_000
"""Points of all series together. Above this, only every n-th is drawn, because a browser redraws the
chart once a second during a run."""
_BINS = 40
_MAX_OUTLIER_SHARE = 0.005
"""Maximum share of a series' updates that count as outliers, but at least one update."""
_FEW_VALUES = 10
"""If no update has a higher staleness, the histogram shows all."""
_AXIS = Axis("staleness", "versions", whole=True, limits=(-0.5, None))  # shows points at 0 completely


def over_time(runs: Sequence[Run]) -> Chart:
    """A point per update, or per update of an evenly spaced sample if there are too many."""
    layers, series = [], list(_series(runs))
    every = max(1, -(-sum(len(updates) for _, updates in series) // _MAX_POINTS))
    for index, (name, updates) in enumerate(series):
        shown = updates.iloc[::every]
        columns = arrays(
            x=shown["applied"],
            y=shown["staleness"],
            client=shown["client"].astype(str),
            sequence=shown["sequence"],
        )
        hover = {"client": "client", "sequence": "sequence", "staleness": "y", "applied (s)": "x"}
        layers.append(Layer(name, "points", columns, color=color(index), hover=hover))
    note = "an evenly spaced sample of the updates" if every > 1 else ""
    time = Axis("device time", "s", limits=(0.0, None))
    chart = Chart("Staleness of applied updates", time, _AXIS, tuple(layers), note=note)
    return with_actions(chart, runs)


def histogram(runs: Sequence[Run]) -> Chart:
    """If a few updates have a much higher staleness than all others, they are left out, and the chart's
    note has their number."""
    series = list(_series(runs))
    values = [updates["staleness"].to_numpy(np.int64) for _, updates in series if len(updates)]
    highest = _highest_shown(values)
    step = max(1, -(-(highest + 1) // _BINS))
    edges = np.arange(0, highest + 1 + step, step) - 0.5  # so that integers are in the middle of bins
    last = int(edges[-1])
    above, count = sum(int((own > last).sum()) for own in values), sum(map(len, values))
    layers = []
    for index, (name, updates) in enumerate(series):
        counts, _ = np.histogram(updates["staleness"], edges)
        share = 100 * counts / max(len(updates), 1)
        width = step / (len(series) + 0.5)
        middle = edges[:-1] + step / 2 + (index - (len(series) - 1) / 2) * width
        columns = arrays(
            x=middle, y=share, width=np.full(len(middle), 0.95 * width), count=counts,
            first=edges[:-1] + 0.5, last=edges[1:] - 0.5,
        )  # fmt: skip
        hover = {"series": "$name", "from": "first", "to": "last", "updates": "count", "share (%)": "y"}
        layers.append(Layer(name, "bars", columns, color=color(index), hover=hover))
    y = Axis("share of the updates", "%", limits=(0.0, None))
    note = f"not shown: {above:,} of {quantity(count, 'update')} above {last}" if above else ""
    x = replace(_AXIS, limits=(None, None))
    return Chart("Staleness distribution", x, y, tuple(layers), note=note)


def _highest_shown(series: Sequence[npt.NDArray[np.int64]]) -> int:
    """Values above `_FEW_VALUES` and more than twice the highest staleness that is not an outlier are
    not shown."""
    usual = max((_without_outliers(own) for own in series), default=0)
    limit = max(_FEW_VALUES, 2 * usual)
    return max((int(own[own <= limit].max(initial=0)) for own in series), default=0)


def _without_outliers(staleness: npt.NDArray[np.int64]) -> int:
    outliers = min(max(1, int(_MAX_OUTLIER_SHARE * len(staleness))), len(staleness) - 1)
    return int(np.sort(staleness)[-1 - outliers])


def _series(runs: Sequence[Run]) -> Iterator[tuple[str, pd.DataFrame]]:
    if len(runs) > 1:
        for name, same in by_settings(runs).items():
            yield name, pd.concat([run.updates for run in same])
        return
    for run in runs:
        for group in run.devices["group"].cat.categories:
            yield str(group), run.updates[run.updates["group"] == group]
        if len(rest := run.updates[run.updates["group"].isna()]):
            yield "no group", rest
