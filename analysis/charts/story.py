"""Comparison of runs of one fleet: accuracy over device time, and below it the states of the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analysis.charts import chart
from analysis.charts.chart import COLORS, Axis, Chart, Layer, arrays, color, group_ticks
from analysis.charts.learning_curves import curves
from analysis.device_states import STATES, TRANSFER, timeline
from analysis.load import Run
from analysis.names import by_settings
from analysis.summary import verdicts

_OPACITY = {
    "train": 1.0,
    "mask": 0.85,
    "download": 0.35,
    "upload": 0.35,
    "unfinished": 0.9,
    "paused": 0.4,
    "offline": 0.4,
    "unpowered": 0.4,
}
"""Opacity, from 0 to 1. Work for applied updates has the strip's colour; other states are grey."""
_SHADES = np.array([_OPACITY.get(state, 0.0) for state in STATES])
_IS_APPLIED = np.isin(STATES, ["train", "mask", *TRANSFER])
_LANE = 0.022
"""Height of a device's lane relative to a chart's: about that of its name. A strip has 0.1 to 0.5."""


def story(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart of the accuracy of `runs` (of the loss if there is none), followed by strips.

    A strip is a chart of the states of devices, for each set of runs that differ only in their seed,
    with a lane for each device of the set's first run. All charts have the same x axis, for
    `paper.stack`.
    """
    sets = by_settings(runs)
    longest = max((run.duration for run in runs), default=0.0)
    time = Axis("device time", "s", limits=(0.0, longest or None))
    has_accuracy = any(run.evaluations["accuracy"].notna().any() for run in runs)
    progress = curves(runs, "accuracy" if has_accuracy else "loss", "time")
    layers = tuple(layer for layer in progress.layers if layer.mark != "rules")
    strips = [
        _strip(_title(name, same), time, same[0], color(index))
        for index, (name, same) in enumerate(sets.items())
    ]
    note = (
        "lanes below: training (full colour), download and upload (pale) of applied updates; rounds "
        "without applied update (dark grey), paused, offline or without power (light grey)"
    )
    of_strips = dict.fromkeys(strip.note for strip in strips)
    first = replace(progress, x=time, layers=layers, key=(), height=0.85).with_note(note, *of_strips)
    return [first, *(replace(strip, note="") for strip in strips)]


def _title(name: str, runs: Sequence[Run]) -> str:
    """Name of a set, with the number of its runs that are not valid or not judged."""
    doubtful = [
        f"{one}: {count}" for one, count in verdicts(runs).items() if one in ("not valid", "not judged")
    ]
    return f"{name} ({', '.join(doubtful)} of {len(runs)} runs)" if doubtful else name


def _strip(name: str, time: Axis, run: Run, hue: str) -> Chart:
    spans = timeline(run)
    spans = spans[spans["state"] != "wait"]
    state = spans["state"].cat.codes
    columns = arrays(
        y=spans["device"].cat.codes,
        height=np.full(len(spans), 0.8),
        begin=spans["begin"],
        end=spans["end"],
        color=np.where(_IS_APPLIED[state], COLORS.index(hue), COLORS.index("grey")),
        shade=_SHADES[state],
    )
    layer = Layer("devices", "spans", columns, color=hue, legend=False)
    devices = [*spans["device"].cat.categories]
    height = float(np.clip(_LANE * len(devices), 0.1, 0.5))
    groups = [*run.devices["group"], *[""] * (len(devices) - len(run.devices))]
    ticks = group_ticks(devices, groups, len(set(groups)))
    if len(ticks) > 1 and np.diff(sorted(ticks)).min() * height / len(devices) < 0.9 * _LANE:
        ticks = {}
    axis = Axis("", ticks=ticks, limits=(len(devices) - 0.5, -0.5))
    return Chart(name, time, axis, (layer,), note=chart.shares_note(columns), height=height)
