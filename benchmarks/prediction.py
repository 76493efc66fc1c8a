"""Virtual time's predictions compared with measurements: the same runs, simulated and in containers.

    python -m benchmarks.prediction [SWEEP] [--steps own] [--only NAME ...] [--seeds N]

It prints a table of docs/evidence/virtual-time.md. If no Docker engine answers, local processes are used
instead. Datasets other than the digits come from TESTBED_DATA. Runs stay in `runs/`; those in containers
are not repeated. The machine should be quiet. `--steps` says what a step costs in virtual time:

- `own`: what it cost in the run that is predicted (`calibrate RUN`). The ratios then test the rest of
  the time model. Takes a minute per experiment and seed.
- `runs`: what it cost in the other seeds' runs of the same experiment, an hour before or after.
- `uneven`: as `own`, and each device is as much faster or slower as it was in the run. The ratios then
  show what remains: the order of a few updates depends on a per cent of a device's speed.
- `measured`: what virtual time measures by itself, as it does if `virtual.step_time` is not given. The
  speed of a host changes within minutes, so each run has two predictions, one directly before and one
  directly after it, and the mean of their logarithms counts. Takes a minute and a half per experiment
  and seed.

Ratios are measurement ÷ prediction for runs with the same seed: geometric means over the seeds, with 95
% intervals (Student's t, of the logarithms).

The time model: a training takes steps × step time ÷ CPU share, and an update 3 ms of CPU time at that
share; a transfer takes bytes with headers ÷ rate, one after the other, less the packet that the shaper
lets pass at once. It ignores the following, so there are fewer updates than predicted:

- the rest of the device, at the same CPU share: its init's telemetry takes about a thousandth of a core,
  ten times as much of a device with 0.05 cores as of one with 0.5;
- acknowledgements on the wire, and the aggregator's own milliseconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

import testbed
from analysis import metrics, summary
from analysis.load import Run, load
from testbed import sweeps
from testbed.run import preparing
from testbed.run.options import Options
from testbed.sweeps import sweeping
from testbed.topology import Virtual

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
    choices = ("own", "runs", "uneven", "measured")
    parser.add_argument("--steps", choices=choices, default="own", help="their time")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="use only these variants of the sweep")
    parser.add_argument("--seeds", type=int, metavar="N", help="use only the sweep's first N seeds")
    wanted = parser.parse_args()
    root = os.environ.get("TESTBED_DATA")
    data = None if root is None else Path(root)
    real = Options(preparing.choose_runtime(Options()), data_root=data)
    cells = cells_of(sweeps.load(wanted.sweep, real), wanted.only, wanted.seeds)
    if wanted.steps == "measured":
        virtual = Options("virtual", data_root=data)
        simulated = cells_of(sweeps.load(wanted.sweep, virtual), wanted.only, wanted.seeds)
        pairs = list(_by_measurements(simulated, virtual, cells, real))
    else:
        pairs = list(by_runs(cells, real, _RUNS, own=wanted.steps != "runs"))
    if wanted.steps == "uneven":
        pairs = [uneven(pair, real, _RUNS / f"{wanted.sweep.stem}-uneven") for pair in pairs]
    print(f"Measured ({real.runtime}) ÷ predicted; runs: {_told([pair.measured for pair in pairs])}\n")
    for line in table(pairs):
        print(line)


@dataclass(frozen=True, slots=True)
class Pair:
    """Measurement of one cell of the sweep, and its predictions."""

    variant: str
    measured: Run
    predicted: tuple[Run, ...]


def by_runs(cells: Sequence[sweeps.Sweep], real: Options, folder: Path, *, own: bool) -> Iterator[Pair]:
    """Yield a pair for each cell that does not fail.

    In virtual time a step takes what it took in the measured run (`own`), or in those of the same
    variant with other seeds.
    """
    by_seed = sorted(cells, key=lambda cell: cell.cells[0].topology.seed)  # runs of a seed are adjacent
    found = [(one, run) for one in by_seed if (run := _run(one, real, folder / one.name)) is not None]
    for one in cells:
        (cell,) = one.cells
        same = [(its, run) for its, run in found if its.cells[0].variant == cell.variant]
        measured = next((run for its, run in same if its is one), None)
        if measured is None:
            continue
        known = [measured] if own else [run for its, run in same if its is not one]
        if not known:
            sys.exit(f"{cell.name}: no run with another seed has measured the time of a step")
        steps = testbed.step_time(known).virtual
        costs = f"{steps['step_time']}, in slices {steps['sliced_step_time']}"
        print(f"{cell.name}: a step took {costs}", file=sys.stderr)
        predicted = testbed.simulate(
            cell.topology, virtual=steps, data=real.data_root, runs=folder / f"{one.name}-predicted"
        )
        yield Pair(cell.variant, measured, (predicted,))


def uneven(pair: Pair, options: Options, folder: Path) -> Pair:
    """Predict `pair` again, with each device as much faster or slower as it was when measured."""
    (run,) = pair.predicted
    virtual = Virtual(**run.topology["virtual"])
    whole, sliced = virtual.step_time, virtual.sliced_step_time
    assert whole is not None and sliced is not None  # noqa: S101, PT018  (by `by_runs`)
    devices = testbed.step_time([pair.measured]).devices
    factors = (whole + (sliced - whole) * devices["depth"]) / devices["step"]
    print(f"{pair.variant}: speeds of devices {factors.round(3).tolist()}", file=sys.stderr)
    shares = zip(devices["device"], devices["cpu"] * factors, strict=True)
    scenario = [{"at": "0s", "set": device, "cpu": round(cpu, 6)} for device, cpu in shares]
    changed = {**run.topology, "scenario": [*scenario, *run.topology["scenario"]]}
    predicted = testbed.simulate(changed, data=options.data_root, runs=folder)
    return Pair(pair.variant, pair.measured, (predicted,))


def _by_measurements(
    simulated: Iterable[sweeps.Sweep],
    virtual: Options,
    emulated: Iterable[sweeps.Sweep],
    real: Options,
) -> Iterator[Pair]:
    """Yield a pair for each cell that does not fail, in order; virtual time measures the time of a
    step."""
    for one, same in zip(simulated, emulated, strict=True):
        before = _run(one, virtual, _RUNS / f"{one.name}-before")
        measured = _run(same, real, _RUNS / same.name)
        after = _run(one, virtual, _RUNS / one.name)
        if before is not None and measured is not None and after is not None:
            yield Pair(one.cells[0].variant, measured, (before, after))


def cells_of(
    study: sweeps.Sweep, variants: Sequence[str] | None = None, count: int | None = None
) -> list[sweeps.Sweep]:
    """Return the cells of `study`, or those of some variants and the first `count` seeds.

    Each is a sweep of its own, so that none takes the time of a step from another.
    """
    variants = variants or list(dict.fromkeys(cell.variant for cell in study.cells))
    seeds = sorted({cell.topology.seed for cell in study.cells})[:count]
    if unknown := sorted({*variants} - {cell.variant for cell in study.cells}):
        sys.exit(f"{study.name} has no variant {', '.join(unknown)}")
    return [
        replace(study, cells=(cell,))
        for cell in study.cells
        if cell.variant in variants and cell.topology.seed in seeds
    ]


def _run(study: sweeps.Sweep, options: Options, folder: Path) -> Run | None:
    """Return the run of the only cell of `study`; None if it failed."""
    sweeping.run(study, options, folder, report=lambda text: print(text, file=sys.stderr))
    run = sweeping.Index.read(folder).finished_run(study.cells[0])
    return None if run is None else load(run.path)


def _told(runs: Sequence[Run]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in summary.verdicts(runs).items())


def table(pairs: Iterable[Pair]) -> Iterator[str]:
    """Yield Markdown: one row per quantity, one column per variant of the sweep."""
    ratios = pd.DataFrame([{"variant": pair.variant, **_mean_log_ratios(pair)} for pair in pairs])
    columns = {str(variant): own for variant, own in ratios.groupby("variant", sort=False)}
    yield f"| measured ÷ predicted | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for quantity in ratios.columns.drop("variant"):
        cells = (_interval(of[quantity].to_numpy(np.float64)) for of in columns.values())
        yield f"| {quantity} | {' | '.join(cells)} |"


def _mean_log_ratios(pair: Pair) -> dict[str, float]:
    ratios = [_log_ratios(predicted, pair.measured) for predicted in pair.predicted]
    return {title: fmean(one[title] for one in ratios) for title in ratios[0]}


def _log_ratios(predicted: Run, measured: Run) -> dict[str, float]:
    """Logarithms of measured ÷ predicted; figures of devices are means over the devices."""
    left, right = devices(predicted), devices(measured)
    ratios = np.log((right / left).replace([0.0, np.inf], np.nan))
    found = {title: float(ratios[name].mean()) for name, title in _DEVICE_QUANTITIES.items()}
    for accuracy in _ACCURACIES:
        times = [metrics.crossed(run, "accuracy", accuracy) for run in (measured, predicted)]
        found[f"time to {accuracy:.0%}"] = float(np.log(times[0] / times[1]))
    return found


def _interval(logs: npt.NDArray[np.float64]) -> str:
    """Format `1.02 (0.99 to 1.05)`; without an interval for one seed; `–` if a seed has no value."""
    if not np.isfinite(logs).all():
        return "–"
    mean = logs.mean()
    if len(logs) == 1:
        return f"{np.exp(mean):.2f}"
    half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
    return f"{np.exp(mean):.2f} ({np.exp(mean - half):.2f} to {np.exp(mean + half):.2f})"


def devices(run: Run) -> pd.DataFrame:
    """Return one row per device: applied updates, mean staleness, and median times in seconds."""
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
