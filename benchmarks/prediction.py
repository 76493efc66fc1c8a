"""Virtual time's prediction of a run against its measurement in Docker: the same topology in both.

    python -m benchmarks.prediction [TOPOLOGY]

Where no Docker engine answers, local processes stand in. Virtual time measures a step's CPU time on this
machine, unless the topology gives it: let the machine be quiet.
Ratios are measurement ÷ prediction. Datasets other than the digits come from TESTBED_DATA.

What the time model knows: a training is steps × step time ÷ CPU share, a transfer payload ÷ rate, one
after the other. What it leaves out of a device's time, so that there are fewer updates than predicted:

- what an update costs beside its steps, at the same CPU share: decoding, encoding, MQTT;
- the rest of the device, at the same CPU share: its init's telemetry takes about half a percent of a
  core, which a device of 0.05 cores feels ten times as much as one of 0.5;
- that a device which comes back after its pause (the quota deals out 5 ms or more at a time)
  finds the caches full of others' data: the smaller the share and the busier the host, the more a step
  costs;
- the aggregator's and the broker's own milliseconds, and headers and acknowledgements on the wire.

And of the link, so that transfers are shorter than predicted: the shaper lets the first packet (1.5 kB)
after a pause through at once, half of the update of a small model.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from analysis import load, summary
from analysis.load import Run
from testbed import topology
from testbed.run import up
from testbed.rundir.directory import RunDirectory, new_run_id
from testbed.view import View

_TOPOLOGY = Path(__file__).parent.parent / "topologies" / "prediction.yaml"
_ACCURACIES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
_HEADER = f"{'predicted':>12}{'measured':>10}{'ratio':>7}"


class Progress(View):
    """Says how it goes on, on stderr."""

    def progress(self, message: str) -> None:
        print(f"  {message}", file=sys.stderr)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else _TOPOLOGY
    runtime = up.chosen_runtime(up.Options())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        predicted, measured = (run(path, how, folder / how) for how in ("virtual", runtime))
        for line in comparison(predicted, measured):
            print(line)


def run(path: Path, runtime: str, runs: Path) -> Run:
    """`testbed up` without its tables."""
    print(f"{path.name} in {runtime}", file=sys.stderr)
    root = os.environ.get("TESTBED_DATA")
    options = up.Options(runtime=runtime, data_root=None if root is None else Path(root))
    wanted, plan = up.planned(path, options)
    directory = RunDirectory.create(runs, new_run_id(wanted.name))
    up.run(wanted, plan, directory, options, Progress())
    return load.load(directory.path)


def comparison(predicted: Run, measured: Run) -> Iterator[str]:
    """The table: devices, then the model's progress."""
    step_time = topology.load(predicted.path / "topology.yaml").runtime.step_time or math.nan
    left, right = table(predicted), table(measured)
    left["cpu_per_step"] = 1e3 * step_time
    right["cpu_per_step"] = 1e3 * cpu_per_step(measured)
    runtime = measured.manifest["runtime"]
    yield f"Virtual time against {runtime}, {measured.duration:.0f} s, with a step of {step_time:.3g} s"
    for quantity, title in _QUANTITIES.items():
        yield f"\n{title:<24}{_HEADER}"
        for device in left.index:
            yield _line(device, left.loc[device, quantity], right.loc[device, quantity])
    yield f"\n{'seconds to an accuracy':<24}{_HEADER}"
    for accuracy in _ACCURACIES:
        times = [time_to(accuracy, of) for of in (predicted, measured)]
        yield _line(f"{accuracy:.0%}", *times)


_QUANTITIES = {
    "updates": "updates",
    "staleness": "mean staleness",
    "training": "training, s",
    "cpu_per_step": "CPU time per step, ms",
    "download": "download, s",
    "upload": "upload, s",
}


def table(run: Run) -> pd.DataFrame:
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


def cpu_per_step(run: Run) -> pd.Series[float]:
    """Seconds of CPU time that each device took, for whatever, per step that went into the model."""
    telemetry, updates = run.telemetry, run.updates
    recent = telemetry[telemetry["at"] > telemetry["at"].max() - run.duration]
    samples = recent.groupby("device")[["at", "cpu"]]
    taken = samples.last() - samples.first()
    steps_per_second = updates.groupby("client")["steps"].sum() / run.duration
    cost: pd.Series[float] = taken["cpu"] / taken["at"] / steps_per_second
    return cost


def time_to(accuracy: float, run: Run) -> float:
    """Device time of the first evaluation that was as good, in seconds; NaN if none was."""
    good = run.evaluations[run.evaluations["accuracy"] >= accuracy]
    return float(good["at"].min())


def _line(name: str, predicted: float, measured: float) -> str:
    ratio = measured / predicted if predicted else math.nan
    return f"  {name:<22}{_number(predicted, 12)}{_number(measured, 10)}{_number(ratio, 7, '.2f')}"


def _number(value: float, width: int, how: str = ".4g") -> str:
    return f"{'–' if math.isnan(value) else format(value, how):>{width}}"


if __name__ == "__main__":
    main()
