"""Charts of runs. Each is a function from runs to a `Chart`, which is then drawn for print or the
screen.

    paper.draw(CHARTS["accuracy"]([run])).savefig("accuracy.pdf")   # matplotlib
    drawn = screen.draw(CHARTS["accuracy"]([run]))                  # Bokeh: drawn.figure
    drawn.update(CHARTS["accuracy"]([run]))                         # later, with more data

`chart` defines what a chart is; `paper` and `screen` draw it; each other module has one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from analysis.figures import has
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


@dataclass(frozen=True, slots=True)
class OnPage:
    """A chart that the page in the browser shows below accuracy and loss."""

    of_all_runs: bool = False
    """Whether one chart has all runs. Else there is one for each run."""
    wanted: Callable[[Run], bool] = lambda _: True
    """Whether a run shows it. The page must know it from the start, before there are records."""
    rows: str = ""
    """Rows that it shows, of which only the newest are in memory: `updates` or `samples`."""


def _is_emulated(run: Run) -> bool:
    """Whether anything is measured."""
    return "monotonic_zero" in run.manifest


def _evaluates_by_device(run: Run) -> bool:
    evaluate = run.topology.get("evaluate")
    return isinstance(evaluate, dict) and bool(evaluate.get("devices"))


PAGE_CHARTS: Mapping[str, OnPage] = {
    "loss-by-device": OnPage(of_all_runs=True, wanted=_evaluates_by_device),
    "accuracy-by-energy": OnPage(of_all_runs=True, wanted=lambda run: "energy" in has(run.manifest)),
    **dict.fromkeys(
        ("devices", "staleness", "staleness-histogram", "contributions"), OnPage(rows="updates")
    ),
    **dict.fromkeys(
        ("cpu-over-time", "memory-over-time", "rates-over-time", "cpu", "rates"),
        OnPage(wanted=_is_emulated, rows="samples"),
    ),
    "participation": OnPage(wanted=lambda run: bool(run.topology.get("selection"))),
    "segments-over-time": OnPage(wanted=lambda run: not run.network.empty),
    "battery-over-time": OnPage(wanted=lambda run: "batteries" in has(run.manifest)),
    "power-over-time": OnPage(wanted=lambda run: "energy" in has(run.manifest)),
}
"""Charts of the page, in its order."""
