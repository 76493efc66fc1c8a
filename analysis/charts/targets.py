"""Time to reach an accuracy, as bars: a rule's runs that differ in their seed share one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis import metrics
from analysis.charts.chart import Axis, Chart, Layer, arrays, color
from analysis.load import Run
from analysis.names import alike

_TARGETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
_MAX_TARGETS = 4
"""Targets that are shown: the highest that any run reached."""


def time_to_accuracy(runs: Sequence[Run], targets: Sequence[float] | None = None) -> Chart:
    """Whiskers: 95% of Student's t over seeds. No bar where a run of the set never reached it."""
    best = max((float(run.evaluations["accuracy"].max()) for run in runs), default=np.nan)
    shown = targets if targets is not None else [t for t in _TARGETS if t <= best][-_MAX_TARGETS:]
    sets = alike(runs)
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
