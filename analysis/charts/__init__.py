"""Charts of runs: each is a function from runs to a `Chart`, which is drawn on paper or on the screen.

    paper.draw(CHARTS["accuracy"]([run])).savefig("accuracy.pdf")   # matplotlib
    drawn = screen.draw(CHARTS["accuracy"]([run]))                  # Bokeh: drawn.figure
    drawn.update(CHARTS["accuracy"]([run]))                         # later, with more data

One module per kind of chart; `chart` says what a chart is, `paper` and `screen` draw it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from analysis.charts import contributions, fidelity, lanes, progress, staleness, targets
from analysis.charts.chart import Chart
from analysis.load import Run

CHARTS: Mapping[str, Callable[[Sequence[Run]], Chart]] = {
    "accuracy": progress.accuracy,
    "accuracy-by-version": progress.accuracy_by_version,
    "accuracy-by-bytes": progress.accuracy_by_bytes,
    "loss": progress.loss,
    "loss-by-version": progress.loss_by_version,
    "loss-by-bytes": progress.loss_by_bytes,
    "devices": lanes.lanes,
    "staleness": staleness.over_time,
    "staleness-histogram": staleness.histogram,
    "contributions": contributions.contributions,
    "cpu": fidelity.cpu,
    "rates": fidelity.rates,
    "time-to-accuracy": targets.time_to_accuracy,
}
"""Every chart, by name. It is of one run or more."""
