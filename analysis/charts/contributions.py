"""What each device gave to the model, against what it should: q̃ against p, and χ²."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis import metrics
from analysis.charts.chart import Axis, Chart, Layer, arrays, color, group_ticks
from analysis.load import Run
from analysis.names import distinct


def contributions(runs: Sequence[Run]) -> Chart:
    """A point per device, in the order of the plan, at what it counted for; a line where it should."""
    layers: list[Layer] = []
    notes: list[str] = []
    labels: list[str] = []
    groups: list[str] = []
    for name, run in distinct(runs).items():
        table = metrics.contributions(run)
        table = table.assign(x=np.arange(len(table)), group=table["group"].astype(str))
        if len(table) > len(labels):
            labels, groups = [*table.index], [*table["group"]]
        notes.append(_note(run) if len(runs) == 1 else f"{name}: {_note(run)}")
        if not layers:  # runs that are compared mostly share their plan
            edges = np.append(table["x"], len(table)) - 0.5
            planned = np.append(table["importance"], table["importance"].iloc[-1:]) * 100
            layers.append(
                Layer("importance p", "step", arrays(x=edges[: len(planned)], y=planned), color="grey")
            )
        parts = table.groupby("group", sort=False) if len(runs) == 1 else [(name, table)]
        for series, own in parts:
            columns = arrays(
                x=own["x"],
                y=100 * own["effective"],
                device=own.index.astype(str),
                importance=100 * own["importance"],
                updates=own["updates"],
                share=100 * own["share"],
            )
            hover = {"device": "device", "effective (%)": "y", "importance (%)": "importance",
                     "updates": "updates", "share of updates (%)": "share"}  # fmt: skip
            layers.append(
                Layer(str(series), "points", columns, color=color(len(layers) - 1), hover=hover)
            )
    return Chart(
        "Contribution and importance",
        Axis("", ticks=group_ticks(labels, groups, 10)),
        Axis("effective importance q̃", "%", limits=(0.0, None)),
        tuple(layers),
        note="; ".join(notes),
    )


def _note(run: Run) -> str:
    bias, table = metrics.bias(run), metrics.contributions(run)
    told = f"χ² = {bias.chi_square:.3g}, Jain's index {metrics.jain(table['effective']):.3g}"
    return told + (f", {bias.missed:.1%} of the importance unheard" if bias.missed > 0 else "")
