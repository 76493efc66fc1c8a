"""Virtual time's predictions against measurements: the same runs, simulated and in containers.

    python -m benchmarks.prediction [SWEEP] [--only NAME ...] [--seeds N]

It prints the table of docs/virtual-time.md. Where no Docker engine answers, local processes stand in.
Virtual time measures a step's CPU time on this machine, unless a topology gives it. A host's speed
changes within minutes, so each run in containers has two predictions, one right before and one right
after it, and the mean of their logarithms counts. Let the machine be quiet, for a minute and a half per
experiment and seed. Runs stay in `runs/`; what is done is not repeated. Datasets other than the digits
come from TESTBED_DATA.

Ratios are measurement ÷ prediction, of runs with the same seed: geometric means over the seeds, with
95 % intervals (Student's t, of the logarithms).

What the time model knows: a training is steps × step time ÷ CPU share, and an update 3 ms of CPU time at
that share; a transfer is bytes with headers ÷ rate, one after the other, less the packet that the shaper
lets through at once. What it leaves out, so that there are fewer updates than predicted:

- the rest of the device, at the same CPU share: its init's telemetry takes about a thousandth of a
  core, which a device of 0.05 cores feels ten times as much as one of 0.5;
- acknowledgements on the wire, and the aggregator's own milliseconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from analysis import metrics, summary
from analysis.load import Run, load
from testbed import sweeps
from testbed.run import up
from testbed.sweeps import sweeping

_SWEEP = Path(__file__).parent.parent / "topologies" / "prediction" / "six.yaml"
_RUNS = Path("runs")
_DEVICE_QUANTITIES = {
    "updates": "updates per device",
    "staleness": "staleness of updates",
    "training": "training time",
    "download": "model's way down",
    "upload": "update's way up",
}
_ACCURACIES = (0.8, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.prediction", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("sweep", nargs="?", type=Path, default=_SWEEP)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these variants of the sweep alone")
    parser.add_argument("--seeds", type=int, metavar="N", help="the sweep's first N seeds alone")
    wanted = parser.parse_args()
    root = os.environ.get("TESTBED_DATA")
    data = None if root is None else Path(root)
    runtime = up.chosen_runtime(up.Options())
    virtual, real = (up.Options(how, data_root=data) for how in ("virtual", runtime))
    pairs = list(_pairs(wanted, virtual, real))
    print(f"Measured ({runtime}) ÷ predicted; runs: {_told([pair.measured for pair in pairs])}\n")
    for line in table(pairs):
        print(line)


@dataclass(frozen=True, slots=True)
class Pair:
    """What was measured of one cell of the sweep, and the predictions from before and after it."""

    measured: Run
    predicted: tuple[Run, Run]


def _pairs(wanted: argparse.Namespace, virtual: up.Options, real: up.Options) -> Iterator[Pair]:
    """Of each cell that is wanted, in order; without those that failed."""
    for simulated, emulated in zip(_wanted(wanted, virtual), _wanted(wanted, real), strict=True):
        before = _run(simulated, virtual, _RUNS / f"{simulated.name}-before")
        measured = _run(emulated, real, _RUNS / emulated.name)
        after = _run(simulated, virtual, _RUNS / simulated.name)
        if before is not None and measured is not None and after is not None:
            yield Pair(measured, (before, after))


def _wanted(wanted: argparse.Namespace, options: up.Options) -> Iterator[sweeps.Sweep]:
    """The sweep's cells that are wanted, each as a sweep of its own: so that none of them takes the time
    of a step from another."""
    study = sweeps.load(wanted.sweep, options)
    variants = wanted.only or list(dict.fromkeys(cell.variant for cell in study.cells))
    seeds = sorted({cell.topology.seed for cell in study.cells})[: wanted.seeds]
    if unknown := sorted({*variants} - {cell.variant for cell in study.cells}):
        sys.exit(f"{wanted.sweep} has no variant {', '.join(unknown)}")
    for cell in study.cells:
        if cell.variant in variants and cell.topology.seed in seeds:
            yield replace(study, cells=(cell,))


def _run(study: sweeps.Sweep, options: up.Options, folder: Path) -> Run | None:
    """The run of the only cell of `study`; None where it failed."""
    sweeping.run(study, options, folder, report=lambda text: print(text, file=sys.stderr))
    run = sweeping.Index.read(folder).run_of(study.cells[0])
    return None if run is None else load(run.path)


def _told(runs: Sequence[Run]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in summary.verdicts(runs).items())


def table(pairs: Iterable[Pair]) -> Iterator[str]:
    """Markdown: a row per quantity, a column per variant of the sweep."""
    ratios = pd.DataFrame(
        [{"variant": str(pair.measured.manifest["variant"]), **_mean_log_ratios(pair)} for pair in pairs]
    )
    columns = {str(variant): own for variant, own in ratios.groupby("variant", sort=False)}
    yield f"| measured ÷ predicted | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for quantity in ratios.columns.drop("variant"):
        cells = (_interval(of[quantity].to_numpy(np.float64)) for of in columns.values())
        yield f"| {quantity} | {' | '.join(cells)} |"


def _mean_log_ratios(pair: Pair) -> dict[str, float]:
    first, second = (_log_ratios(predicted, pair.measured) for predicted in pair.predicted)
    return {title: (first[title] + second[title]) / 2 for title in first}


def _log_ratios(predicted: Run, measured: Run) -> dict[str, float]:
    """Logarithms of measured ÷ predicted; a device's are means over the devices."""
    left, right = devices(predicted), devices(measured)
    ratios = np.log((right / left).replace([0.0, np.inf], np.nan))
    found = {title: float(ratios[name].mean()) for name, title in _DEVICE_QUANTITIES.items()}
    for accuracy in _ACCURACIES:
        times = [metrics.crossed(run, "accuracy", accuracy) for run in (measured, predicted)]
        found[f"time to {accuracy:.0%}"] = float(np.log(times[0] / times[1]))
    return found


def _interval(logs: npt.NDArray[np.float64]) -> str:
    """`1.02 (0.99 to 1.05)`; without an interval where there is one seed, `–` where any has none."""
    if not np.isfinite(logs).all():
        return "–"
    mean = logs.mean()
    if len(logs) == 1:
        return f"{np.exp(mean):.2f}"
    half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
    return f"{np.exp(mean):.2f} ({np.exp(mean - half):.2f} to {np.exp(mean + half):.2f})"


def devices(run: Run) -> pd.DataFrame:
    """One row per device: its applied updates, their mean staleness, and median times in seconds."""
    updates = run.updates
    times = pd.DataFrame(
        {
            "client": updates["client"],
            "download": updates["downloaded"] - updates["dispatched"],
            "training": updates["train_end"] - updates["train_start"],
            "upload": updates["arrived"] - updates["sent"],
        }
    )
    medians = times.groupby("client").median()
    return summary.devices(run)[["updates", "staleness"]].join(medians)


if __name__ == "__main__":
    main()
