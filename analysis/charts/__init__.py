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

from analysis.charts import contributions, fidelity, lanes, parts, staleness, telemetry
from analysis.charts.chart import Chart
from analysis.charts.learning_curves import curves, target_reached, time_to_accuracy
from analysis.features import PARTS, PROGRESS
from analysis.load import Run

_OF_FEATURES = {name: one for part in PARTS for name, one in part.charts.items()}
CHARTS: Mapping[str, Callable[[Sequence[Run]], Chart]] = {
    "accuracy": partial(curves, quality="accuracy", against="time"),
    "accuracy-by-class": partial(parts.accuracy, by="class"),
    "accuracy-by-group": partial(parts.accuracy, by="group"),
    "loss": partial(curves, quality="loss", against="time"),
    "loss-by-device": parts.losses,
    **{
        f"{quality}-by-{name}": partial(curves, quality=quality, against=name)
        for name in ("version", "bytes", *(one.name for one in PROGRESS))
        for quality in ("accuracy", "loss")
    },
    "devices": lanes.lanes,
    "staleness": staleness.over_time,
    "staleness-histogram": staleness.histogram,
    "contributions": contributions.contributions,
    "cpu": fidelity.cpu,
    "rates": fidelity.rates,
    "cpu-over-time": telemetry.cpu,
    "memory-over-time": telemetry.memory,
    "rates-over-time": telemetry.rates,
    **{name: one.draw for name, one in _OF_FEATURES.items()},
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


_AGAINST = {f"accuracy-by-{one.name}": one.wanted for one in PROGRESS if one.wanted is not None}
PAGE_CHARTS: Mapping[str, OnPage] = {
    "loss-by-device": OnPage(of_all_runs=True, wanted=_evaluates_by_device),
    **{name: OnPage(of_all_runs=True, wanted=wanted) for name, wanted in _AGAINST.items()},
    **dict.fromkeys(
        ("devices", "staleness", "staleness-histogram", "contributions"), OnPage(rows="updates")
    ),
    **dict.fromkeys(
        ("cpu-over-time", "memory-over-time", "rates-over-time", "cpu", "rates"),
        OnPage(wanted=_is_emulated, rows="samples"),
    ),
    **{name: OnPage(wanted=one.wanted) for name, one in _OF_FEATURES.items()},
}
"""Charts of the page below accuracy and loss, in its order."""
ONE_TASK = ("time-to-accuracy", "target-reached")
"""Charts that need the same task of all runs."""
PER_DEVICE = (
    *("devices", "staleness", "staleness-histogram", "contributions"),
    *("cpu-over-time", "memory-over-time", "rates-over-time"),
    *(name for name, one in _OF_FEATURES.items() if one.in_report),
)
"""Charts of a report with much data, or a lane or bar per run or device."""
REPORT_CHARTS = (
    *("accuracy", *_AGAINST, "loss", "accuracy-by-class", "accuracy-by-group", "loss-by-device"),
    *(*ONE_TASK, *PER_DEVICE, "cpu", "rates"),
)
"""Charts of a report, in its order."""
