"""Stretched time compared with unstretched time: one fleet that fits this host, at dilations 1 and 4.

    python -m benchmarks.dilation [TOPOLOGY]

All figures are device time, so the two should agree. A run at dilation 4 takes as long as four runs at
dilation 1, which are done before and after it: so if the host's cores are slower for a while, because of
other guests, both are affected. Figures are means (± standard error) over all runs of a dilation. Takes
a quarter of an hour on a quiet machine. Datasets other than digits come from TESTBED_DATA.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from analysis import metrics
from analysis.load import Run, load
from benchmarks.prediction import devices
from testbed.run import preparing, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.view import View

_TOPOLOGY = Path(__file__).parent.parent / "topologies" / "dilation.yaml"
_DILATION = 4
_TURN = (1, 1, _DILATION, 1, 1)
_TURNS = 3


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else _TOPOLOGY
    runtime = preparing.choose_runtime(Options())
    wanted = yaml.safe_load(path.read_text(encoding="utf-8"))
    runs: dict[int, list[Run]] = {dilation: [] for dilation in _TURN}
    with tempfile.TemporaryDirectory() as name:
        for dilation in _TURN * _TURNS:
            folder = Path(tempfile.mkdtemp(dir=name))
            copy = folder / path.name
            copy.write_text(yaml.safe_dump({**wanted, "dilation": dilation}), encoding="utf-8")
            runs[dilation].append(_run(copy, runtime, folder / "runs"))
        print(f"{path.name} in {runtime}, runs: {len(runs[1])} and {len(runs[_DILATION])}")
        for line in comparison(runs[1], runs[_DILATION]):
            print(line)


def _run(path: Path, runtime: str, runs: Path) -> Run:
    """Run `testbed up` without its tables."""
    print(f"{path.name} in {runtime}", file=sys.stderr)
    root = os.environ.get("TESTBED_DATA")
    options = Options(runtime=runtime, data_root=None if root is None else Path(root))
    wanted, plan = preparing.plan_file(path, options)
    directory = RunDirectory.new(runs, wanted.name)
    up.run(wanted, plan, directory, options, View())
    return load(directory.path)


def comparison(plain: list[Run], stretched: list[Run]) -> Iterator[str]:
    """Yield the table: devices, then the model's progress."""
    yield f"{'':<24}{'dilation 1':>16}{f'dilation {_DILATION}':>18}{'ratio':>15}"
    tables = [[_table(run) for run in runs] for runs in (plain, stretched)]
    for quantity, title in _QUANTITIES.items():
        yield title
        for device in tables[0][0].index:
            yield _line(device, *([float(t.loc[device, quantity]) for t in of] for of in tables))
    yield "seconds to an accuracy"
    for accuracy in (0.5, 0.6, 0.7, 0.8, 0.85):
        times = ([metrics.crossed(run, "accuracy", accuracy) for run in of] for of in (plain, stretched))
        yield _line(f"{accuracy:.0%}", *times)


_QUANTITIES = {"updates": "updates", "staleness": "mean staleness", "cost": "CPU time per step, ms"}


def _table(run: Run) -> pd.DataFrame:
    return devices(run).assign(cost=1e3 * _cpu_per_step(run))


def _cpu_per_step(run: Run) -> pd.Series[float]:
    """CPU seconds of each device, for everything it does, per step that went into the model."""
    telemetry, updates = run.telemetry, run.updates
    recent = telemetry[telemetry["at"] > telemetry["at"].max() - run.duration]
    samples = recent.groupby("device")[["at", "cpu"]]
    taken = samples.last() - samples.first()
    steps_per_second = updates.groupby("client")["steps"].sum() / run.duration
    cost: pd.Series[float] = taken["cpu"] / taken["at"] / steps_per_second
    return cost


def _line(name: str, plain: Sequence[float], stretched: Sequence[float]) -> str:
    means = [np.mean(of) for of in (plain, stretched)]
    errors = [np.std(of, ddof=1) / math.sqrt(len(of)) for of in (plain, stretched)]
    ratio = means[1] / means[0]
    error = ratio * math.hypot(*(error / mean for error, mean in zip(errors, means, strict=True)))
    cells = (f"{mean:>12.4g} ± {error:<5.2g}" for mean, error in zip(means, errors, strict=True))
    return f"  {name:<16}{''.join(cells)}{ratio:>8.3f} ± {error:.3f}"


if __name__ == "__main__":
    main()
