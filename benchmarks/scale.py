"""Cost in virtual time of devices that mostly wait: equal work with 100 to a million devices.

    python -m benchmarks.scale [--most 1000000] [--figure FILE]

Each run is a `testbed up` in a process of its own, from its start to its end: FedBuff, eight devices at
a time, 2,000 updates of 20 steps each, logistic regression on scikit-learn's digits. So only the cost of
the number of devices varies: planning, partitioning, bookkeeping, recording. CPU seconds are those of
all threads; on a busy host they vary less than wall-clock seconds. MB are the maximum that the process
held. The limit is 3 GB for a million devices.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
_LIMIT_MB = 3_000.0
_TOPOLOGY = """
    name: scale
    task:
      name: digits-logreg
      partition: {{scheme: resampled}}
      local: {{steps: 20, batch_size: 32, lr: 0.01}}
    rule: {{name: fedbuff, buffer_size: 4, concurrency: 8}}
    devices: [{{name: client, count: {devices}, timing: {{distribution: exponential, rate: 1}}}}]
    evaluate: {{every: 1min}}
    stop: {{updates: 2000}}
    runtime: {{name: virtual}}
"""


@dataclass(frozen=True, slots=True)
class Measured:
    devices: int
    wall: float
    """Wall-clock seconds."""
    cpu: float
    """CPU seconds."""
    memory: float
    """Maximum memory in MB."""


def run(devices: int) -> Measured:
    """Run `devices` devices. Raises RuntimeError, with the run's output, if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        topology = Path(folder) / "scale.yaml"
        topology.write_text(textwrap.dedent(_TOPOLOGY.format(devices=devices)))
        command = [sys.executable, "-m", "testbed", "up", str(topology), "--runs", folder]
        with tempfile.TemporaryFile("w+") as output:
            begin = time.perf_counter()
            child = subprocess.Popen(command, stdout=output, stderr=output)
            _, status, used = os.wait4(child.pid, 0)
            wall = time.perf_counter() - begin
            child.returncode = os.waitstatus_to_exitcode(status)
            if child.returncode:
                output.seek(0)
                raise RuntimeError(f"the run of {devices} devices failed:\n{output.read()}")
    return Measured(devices, wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def draw(found: Sequence[Measured], path: Path) -> None:
    """Draw CPU seconds and memory against the number of devices, on logarithmic axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    figure = Figure((8, 3.2), layout="constrained")
    devices = [one.devices for one in found]
    panels = (
        ("CPU time of a whole run (s)", [one.cpu for one in found], None),
        ("most memory held (MB)", [one.memory for one in found], _LIMIT_MB),
    )
    for axes, (title, values, limit) in zip(figure.subplots(1, 2), panels, strict=True):
        axes.loglog(devices, values, "o-", color="#0072b2")
        for x, y in zip(devices, values, strict=True):
            axes.annotate(
                f"{y:,.3g}" if y < 100 else f"{y:,.0f}",
                *((x, y), (0, 6)),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        if limit is not None:
            axes.axhline(limit, color="#d55e00", linestyle="--", linewidth=1)
            axes.annotate(
                "the limit", (devices[0], limit), (0, -11), textcoords="offset points", fontsize=8
            )
        low, high = np.log10(min(values)), np.log10(max(*values, limit or 0.0))
        axes.set(title=title, xlabel="devices", ylim=(10 ** np.floor(low), 10 ** np.ceil(high)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            axis.set_minor_formatter(NullFormatter())
        axes.grid(which="major", alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    options = _options()
    print(f"{'devices':>10}{'wall s':>10}{'CPU s':>10}{'MB':>10}")
    found: list[Measured] = []
    for devices in (size for size in _SIZES if size <= options.most):
        found.append(one := run(devices))
        print(f"{devices:>10,}{one.wall:>10.1f}{one.cpu:>10.1f}{one.memory:>10.0f}", flush=True)
    last = found[-1]
    more = 1e3 * (last.cpu - found[0].cpu) / last.devices
    print(f"each device costs {more:.2f} ms of CPU time; {last.devices:,} of them take")
    print(f"{last.memory:,.0f} MB, {_LIMIT_MB / last.memory:.1f} times within {_LIMIT_MB:,.0f} MB")
    if options.figure is not None:
        draw(found, options.figure)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("--most", type=int, default=_SIZES[-1], help="devices")
    parser.add_argument("--figure", type=Path, help="file to draw the chart into")
    return parser.parse_args()


if __name__ == "__main__":
    main()
