"""Test accuracy and loss against time, versions, bytes and more, and time to an accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np

from analysis import comparison, metrics
from analysis.charts.action_marks import with_actions
from analysis.charts.chart import Axis, Chart, Column, Layer, arrays, band_of, color
from analysis.features import PROGRESS
from analysis.load import Run
from analysis.names import by_settings, distinct
from analysis.part import ProgressFigure


def uploaded_bytes(run: Run) -> Column:
    """For each evaluation: payload bytes of the updates in the evaluated version."""
    updates = run.updates.sort_values("applied_version", kind="stable")
    total = np.append(0, updates["bytes"].cumsum())
    place = np.searchsorted(updates["applied_version"], run.evaluations["version"], side="right")
    uploaded: Column = total[place]
    return uploaded


def _at_evaluations(figure: ProgressFigure, run: Run) -> Column:
    return figure.at(run, run.evaluations["at"])


Quality = Literal["accuracy", "loss"]
_X: dict[str, tuple[Axis, Callable[[Run], Column]]] = {
    "time": (Axis("device time", "s"), lambda run: run.evaluations["at"].to_numpy()),
    "version": (Axis("version", whole=True), lambda run: run.evaluations["version"].to_numpy()),
    "bytes": (Axis("data uploaded", "MB"), lambda run: uploaded_bytes(run) / 1e6),
    **{one.name: (Axis(one.label, one.unit), partial(_at_evaluations, one)) for one in PROGRESS},
}
_Y: dict[Quality, tuple[Axis, float]] = {
    "accuracy": (Axis("test accuracy", "%", limits=(0.0, 100.0)), 100.0),
    "loss": (Axis("test loss", limits=(0.0, None)), 1.0),
}
_TARGETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
_MAX_GRID = 400
"""Points of a line that shows the mean over seeds."""
_MAX_TARGETS = 4
"""Accuracies that `time_to_accuracy` shows by default: the highest that any run reached."""


def curves(runs: Sequence[Run], quality: Quality, against: str, *, apart: bool = False) -> Chart:
    """One line per run. Runs that differ only in their seed have one line for their mean, and a band
    from the lowest to the highest value, unless `apart`."""
    (x, values), (y, scale) = _X[against], _Y[quality]
    if against == "time":
        runs = [metrics.lasting(run) for run in runs]
    sets = {name: [run] for name, run in distinct(runs).items()} if apart else by_settings(runs)
    layers: list[Layer] = []
    hues: dict[int, str] = {}
    for index, (name, same) in enumerate(sets.items()):
        hues |= {id(run): color(index) for run in same}
        if len(same) > 1:
            layers += _mean(name, same, quality, against, color(index))
            continue
        evaluations = same[0].evaluations
        columns = arrays(
            x=values(same[0]),
            y=evaluations[quality] * scale,
            version=evaluations["version"],
            at=evaluations["at"],
        )
        hover = {"run": "$name", y.title: "y", "version": "version", "device time (s)": "at"}
        layers.append(Layer(name, "line", columns, color(index), legend=len(sets) > 1, hover=hover))
    title = f"{quality.capitalize()} against {x.label}"
    chart = Chart(title, x, y, tuple(layers), remarks=_line_remarks(sets))
    return with_actions(chart, runs, colors=hues) if against == "time" else chart


def _line_remarks(sets: Mapping[str, Sequence[Run]]) -> tuple[str, ...]:
    """Return remarks on the meaning of a line. There are none if each line is one run."""
    counts = sorted({len(same) for same in sets.values()} - {1})
    if not counts:
        return ()
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f"learning curves: line: mean of {number} seeds, band: lowest to highest",
        "after its end, a run counts with its last value",
    )


def _mean(name: str, runs: Sequence[Run], quality: Quality, against: str, hue: str) -> Iterator[Layer]:
    """Yield a band from the lowest to the highest of `runs`, and a line of their mean.

    The runs are evaluated at different times, so their values are interpolated between evaluations, and
    stay constant after the last one. Both layers begin when every run has had its first evaluation.
    """
    (_, values), (axis, scale) = _X[against], _Y[quality]
    lines = [(np.asarray(values(run), np.float64), run.evaluations[quality] * scale) for run in runs]
    lines = [(x, y) for x, y in lines if len(x)]
    if not lines:
        return
    grid = np.unique(np.concatenate([x for x, _ in lines]))
    if len(grid) > _MAX_GRID:
        grid = np.interp(np.linspace(0, len(grid) - 1, _MAX_GRID), np.arange(len(grid)), grid)
    table = np.array([np.interp(grid, x, y, left=np.nan) for x, y in lines])
    known = ~np.isnan(table).any(axis=0)
    grid, table = grid[known], table[:, known]
    ends = {"low": table.min(axis=0), "high": table.max(axis=0)}
    yield Layer(band_of(name), "band", arrays(x=grid, **ends), hue, legend=False)
    hover = {"mean of": "$name", axis.title: "y", "lowest": "low", "highest": "high"}
    yield Layer(name, "line", arrays(x=grid, y=table.mean(axis=0), **ends), hue, hover=hover)


def time_to_accuracy(runs: Sequence[Run], targets: Sequence[float] | None = None) -> Chart:
    """A bar for each accuracy and each set of runs that differ only in their seed, with 95% intervals
    (Student's t) for at least three runs. Bars are left out if a run never reached the accuracy;
    `target_reached` shows such runs. Times are interpolated between evaluations."""
    best = np.fmax.reduce([run.evaluations["accuracy"].max() for run in runs], initial=np.nan)
    shown = targets if targets is not None else [t for t in _TARGETS if t <= best][-_MAX_TARGETS:]
    sets = by_settings(runs)
    width = 0.8 / max(len(sets), 1)
    layers, lacking = [], []
    for index, (name, same) in enumerate(sets.items()):
        times = {t: [_time(run, t) for run in same] for t in shown}
        found = [metrics.seed_interval(own) for own in times.values()]
        for target, own in times.items():
            if count := int(np.isnan(own).sum()):
                some = f" ({len(own) - count} of {len(own)} did)" if count < len(own) else ""
                lacking.append(f"{name} {target:.0%}{some}")
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
        Axis(
            "test accuracy",
            ticks={float(i): f"{t:.0%}" for i, t in enumerate(shown)},
            limits=(-0.5, len(shown) - 0.5) if shown else (None, None),
        ),
        Axis("device time", "s", limits=(0.0, None)),
        tuple(layers),
        note="not reached: " + ", ".join(lacking) if lacking else "",
    )


def target_reached(runs: Sequence[Run], target: float | None = None) -> Chart:
    """Share of runs that have reached an accuracy (Kaplan–Meier), with a line for each set of runs that
    differ only in their seed. A point marks a run that ended without reaching it.

    `target`: accuracy (share); None for the highest target that all runs reached, or else any run.
    """
    level = comparison.common_target(runs) if target is None else target
    layers: list[Layer] = []
    sets = by_settings(runs) if level is not None else {}
    longest = max((metrics.observed(run).time for run in runs), default=0.0)
    for index, (name, same) in enumerate(sets.items()):
        times = [_time(run, level or 0.0) for run in same]
        limits = [metrics.observed(run).time for run in same]
        at, reached = metrics.kaplan_meier(times, limits)
        x, y = np.append(0.0, at), np.append(0.0, 100 * reached)
        if np.isclose(y[-1], 100) and len(at):  # all have reached it, and the share stays
            x, y = np.append(x, longest), np.append(y, y[-1])
        columns = arrays(x=x, y=y)
        hover = {"runs": "$name", "reached (%)": "y", "device time (s)": "x"}
        layers.append(Layer(name, "step", columns, color(index), legend=len(sets) > 1, hover=hover))
        ends = np.array([end for end, time in zip(limits, times, strict=True) if np.isnan(time)])
        share = 100 * reached[np.searchsorted(at, ends)] if len(ends) else ends
        columns = arrays(x=ends, y=share)
        layers.append(Layer(f"{name}, missed", "points", columns, color(index), legend=False))
    shown = "an accuracy" if level is None else f"an accuracy of {comparison.percent(level)}"
    return Chart(
        f"Runs that have reached {shown}",
        Axis("device time", "s", limits=(0.0, None)),
        Axis("runs", "%", limits=(0.0, 102.0)),
        tuple(layers),
        note="Kaplan–Meier; points: runs that ended without it",
    )


def _time(run: Run, target: float) -> float:
    """Interpolated seconds to an accuracy; NaN if the run did not reach it."""
    time = metrics.crossed(run, "accuracy", target)
    return time if np.isfinite(time) else np.nan
