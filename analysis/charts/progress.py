"""Accuracy and loss on the test set against time, versions and bytes; several runs overlaid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from analysis.charts.chart import Axis, Chart, Column, Layer, arrays, color
from analysis.charts.marks import marked
from analysis.load import Run
from analysis.names import alike, distinct


def accuracy(runs: Sequence[Run]) -> Chart:
    return _chart(runs, "accuracy", _TIME)


def accuracy_by_version(runs: Sequence[Run]) -> Chart:
    return _chart(runs, "accuracy", _VERSIONS)


def accuracy_by_bytes(runs: Sequence[Run]) -> Chart:
    return _chart(runs, "accuracy", _BYTES)


def loss(runs: Sequence[Run]) -> Chart:
    return _chart(runs, "loss", _TIME)


def loss_by_version(runs: Sequence[Run]) -> Chart:
    return _chart(runs, "loss", _VERSIONS)


def loss_by_bytes(runs: Sequence[Run]) -> Chart:
    return _chart(runs, "loss", _BYTES)


def sent(run: Run) -> Column:
    """Payload bytes of the updates in the model of each evaluation."""
    updates = run.updates.sort_values("applied_version", kind="stable")
    total = np.append(0, updates["bytes"].cumsum())
    place = np.searchsorted(updates["applied_version"], run.evaluations["version"], side="right")
    counted: Column = total[place]
    return counted


_Against = tuple[Axis, Callable[[Run], Column]]
_TIME: _Against = (Axis("device time", "s"), lambda run: run.evaluations["at"].to_numpy())
_VERSIONS: _Against = (Axis("version"), lambda run: run.evaluations["version"].to_numpy())
_BYTES: _Against = (Axis("data uploaded", "MB"), lambda run: sent(run) / 1e6)
_Y = {
    "accuracy": Axis("test accuracy", "%", limits=(0.0, 100.0)),
    "loss": Axis("test loss", limits=(0.0, None)),
}
_SCALE = {"accuracy": 100.0, "loss": 1.0}


def _chart(runs: Sequence[Run], what: str, against: _Against) -> Chart:
    """Runs that differ in their seed share a colour."""
    axis, of = against
    names = {id(run): name for name, run in distinct(runs).items()}
    layers = []
    for index, (words, same) in enumerate(alike(runs).items()):
        for run in same:
            columns = arrays(
                x=of(run),
                y=run.evaluations[what] * _SCALE[what],
                version=run.evaluations["version"],
                at=run.evaluations["at"],
            )
            hover = {"run": "$name", _Y[what].title: "y", "version": "version", "device time (s)": "at"}
            in_legend = len(runs) > 1 and run is same[0]
            layers.append(
                Layer(
                    names[id(run)],
                    "line",
                    columns,
                    color=color(index),
                    legend=in_legend,
                    words=words,
                    hover=hover,
                )
            )
    chart = Chart(f"{what.capitalize()} against {axis.label}", axis, _Y[what], tuple(layers))
    return marked(chart, runs) if against is _TIME else chart
