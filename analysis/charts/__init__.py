"""Charts of runs. Each chart is a function from runs to a `Chart`, which is then drawn for print
or for the screen.

    paper.draw(CHARTS["accuracy"]([run])).savefig("accuracy.pdf")   # matplotlib
    drawn = screen.draw(CHARTS["accuracy"]([run]))                  # Bokeh: drawn.figure
    drawn.update(CHARTS["accuracy"]([run]))                         # later, with more data

There is one module per kind of chart. `chart` defines what a chart is; `paper` and `screen` draw it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from analysis.charts import (
    contributions,
    fidelity,
    lanes,
    participation,
    parts,
    segments,
    spread,
    staleness,
    telemetry,
)
from analysis.charts.chart import Chart
from analysis.charts.learning_curves import curves, target_reached, time_to_accuracy
from analysis.load import Run

CHARTS: Mapping[str, Callable[[Sequence[Run]], Chart]] = {
    "accuracy": partial(curves, quality="accuracy", against="time"),
    "accuracy-by-version": partial(curves, quality="accuracy", against="version"),
    "accuracy-by-bytes": partial(curves, quality="accuracy", against="bytes"),
    "accuracy-by-energy": partial(curves, quality="accuracy", against="energy"),
    "accuracy-by-epsilon": partial(curves, quality="accuracy", against="epsilon"),
    "accuracy-by-class": partial(parts.accuracy, by="class"),
    "accuracy-by-group": partial(parts.accuracy, by="group"),
    "loss": partial(curves, quality="loss", against="time"),
    "loss-by-version": partial(curves, quality="loss", against="version"),
    "loss-by-bytes": partial(curves, quality="loss", against="bytes"),
    "loss-by-energy": partial(curves, quality="loss", against="energy"),
    "loss-by-device": spread.losses,
    "devices": lanes.lanes,
    "staleness": staleness.over_time,
    "staleness-histogram": staleness.histogram,
    "contributions": contributions.contributions,
    "participation": participation.participation,
    "cpu": fidelity.cpu,
    "rates": fidelity.rates,
    "cpu-over-time": telemetry.cpu,
    "memory-over-time": telemetry.memory,
    "rates-over-time": telemetry.rates,
    "battery-over-time": telemetry.battery,
    "power-over-time": telemetry.power,
    "segments-over-time": segments.over_time,
    "time-to-accuracy": time_to_accuracy,
    "target-reached": target_reached,
}
"""All charts, by name. Each function takes one or more runs."""
