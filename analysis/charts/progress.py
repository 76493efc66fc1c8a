"""Accuracy and loss on the test set against time, versions and bytes; the time to reach an accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from analysis import metrics
from analysis.charts.actions import with_actions
from analysis.charts.chart import Axis, Chart, Column, Layer, arrays, color
from analysis.load import Run
from analysis.names import by_settings, distinct


def uploaded_bytes(run: Run) -> Column:
    """Payload bytes of the updates in the model of each evaluation."""
    updates = run.updates.sort_values("applied_version", kind="stable")
    total = np.append(0, updates["bytes"].cumsum())
    place = np.searchsorted(updates["applied_version"], run.evaluations["version"], side="right")
    uploaded: Column = total[place]
    return uploaded


Quality = Literal["accuracy", "loss"]
Progress = Literal["time", "version", "bytes"]
_X: dict[Progress, tuple[Axis, Callable[[Run], Column]]] = {
    "time": (Axis("device time", "s"), lambda run: run.evaluations["at"].to_numpy()),
    "version": (Axis("version"), lambda run: run.evaluations["version"].to_numpy()),
    "bytes": (Axis("data uploaded", "MB"), lambda run: uploaded_bytes(run) / 1e6),
}
_Y: dict[Quality, tuple[Axis, float]] = {
    "accuracy": (Axis("test accuracy", "%", limits=(0.0, 100.0)), 100.0),
    "loss": (Axis("test loss", limits=(0.0, None)), 1.0),
}
"""With what the recorded value is multiplied by."""
_TARGETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
_MAX_TARGETS = 4
"""Targets that are shown: the highest that any run reached."""


def curves(runs: Sequence[Run], quality: Quality, against: Progress) -> Chart:
    """A line per run; runs that differ only in their seed share a colour."""
    (x, values), (y, scale) = _X[against], _Y[quality]
    names = {id(run): name for name, run in distinct(runs).items()}
    layers = []
    hover = {"run": "$name", y.title: "y", "version": "version", "device time (s)": "at"}
    for index, (label, same) in enumerate(by_settings(runs).items()):
        for run in same:
            evaluations, legend = run.evaluations, len(runs) > 1 and run is same[0]
            columns = arrays(
                x=values(run),
                y=evaluations[quality] * scale,
                version=evaluations["version"],
                at=evaluations["at"],
            )
            name = names[id(run)]
            layers.append(
                Layer(name, "line", columns, color(index), label=label, legend=legend, hover=hover)
            )
    chart = Chart(f"{quality.capitalize()} against {x.label}", x, y, tuple(layers))
    return with_actions(chart, runs) if against == "time" else chart


def time_to_accuracy(runs: Sequence[Run], targets: Sequence[float] | None = None) -> Chart:
    """A bar per rule and accuracy, with 95% intervals (Student's t) over its runs of several seeds; none
    where one of these runs never reached it."""
    best = max((float(run.evaluations["accuracy"].max()) for run in runs), default=np.nan)
    shown = targets if targets is not None else [t for t in _TARGETS if t <= best][-_MAX_TARGETS:]
    sets = by_settings(runs)
    width = 0.8 / max(len(sets), 1)
    layers, never = [], []
    for index, (name, same) in enumerate(sets.items()):
        found = [metrics.t_interval([metrics.reached(r, t).time for r in same]) for t in shown]
        never += [f"{name} {t:.0%}" for t, one in zip(shown, found, strict=True) if np.isnan(one.mean)]
        columns = arrays(
            x=np.arange(len(shown)) + (index - (len(sets) - 1) / 2) * width,
            y=[one.mean for one in found],
            width=np.full(len(shown), 0.9 * width),
            low=[one.low for one in found],
            high=[one.high for one in found],
            runs=[one.count for one in found],
        )
        hover = {"rule": "$name", "time (s)": "y", "from": "low", "to": "high", "runs": "runs"}
        layers.append(Layer(name, "bars", columns, color=color(index), hover=hover))
    return Chart(
        "Time to accuracy",
        Axis("test accuracy", ticks={float(i): f"{t:.0%}" for i, t in enumerate(shown)}),
        Axis("device time", "s", limits=(0.0, None)),
        tuple(layers),
        note="never reached: " + ", ".join(never) if never else "",
    )
