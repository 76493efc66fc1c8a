"""Charts of runs: each is a function from runs to a `Chart`, which is drawn for print or for the screen.

from analysis.charts import CHARTS, print, screen

print.draw(CHARTS["accuracy"]([run])).savefig("accuracy.pdf")
drawn = screen.draw(CHARTS["accuracy"]([run]))     # drawn.figure; drawn.update(chart) for new data
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
"""Every chart, by the name that the command line and the page know it by."""
