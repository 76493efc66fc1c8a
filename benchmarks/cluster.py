"""A sweep in virtual time on a Dask cluster, and on Slurm, on this machine.

    python -m benchmarks.cluster speed [--cells 200]    # two workers against one, of one core each
    python -m benchmarks.cluster lost [--cells 200]     # a worker is killed in the middle
    python -m benchmarks.cluster slurm [--cells 20]     # a job is cancelled in the middle; as root

`speed` prints the duration of `testbed sweep` on one worker, on two, and the ratio. Each worker is bound
to a core of its own; scheduler and `testbed sweep` may use all cores. `lost` and `slurm` print how many
cells are done, and how many entries and run directories there are. Needs two cores. `slurm` needs
Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import clusters
from tests.running import TESTBED
from tests.waiting import eventually

_TOPOLOGY = """
name: cell
task: {name: digits-logreg, partition: {scheme: resampled, samples: 60}, local: {steps: 20, lr: 0.1}}
rule: {name: fedbuff, buffer_size: 10}
devices: [{name: pi, count: 100, timing: {distribution: exponential, mean: 2s}}]
evaluate: {every: 5s}
stop: {after: 60s}
runtime: {name: virtual}
virtual: {step_time: 1ms}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["speed", "lost", "slurm"])
    parser.add_argument("--cells", type=int)
    arguments = parser.parse_args()
    cells = arguments.cells or (20 if arguments.what == "slurm" else 200)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "base.yaml").write_text(_TOPOLOGY)
        seeds = [*range(1, cells + 1)]
        (folder / "study.yaml").write_text(f"topology: base.yaml\ngrid: {{seed: {seeds}}}\n")
        if arguments.what == "speed":
            _speed(folder)
        elif arguments.what == "lost":
            _lost(folder, cells)
        else:
            _slurm(folder, cells)


def _speed(folder: Path) -> None:
    found = []
    for count in (1, 2):
        with _workers(folder / f"dask{count}", count) as dask:
            begin = time.monotonic()
            with _sweep(folder, dask.on, f"runs{count}") as running:
                code = running.wait()
            found.append(time.monotonic() - begin)
        print(f"{count} workers: {found[-1]:.1f} s, exit code {code}")
    print(f"ratio: {found[0] / found[1]:.2f}")


def _lost(folder: Path, cells: int) -> None:
    with _workers(folder / "dask", 2) as dask, _sweep(folder, dask.on, "runs") as running:
        index = folder / "runs/study/index.json"
        eventually(lambda: index.exists() and _done(index) >= cells // 2, 3600)
        dask.workers[0].kill()
        print(f"killed a worker after {_done(index)} cells")
        running.wait()
        _show(index)


def _slurm(folder: Path, cells: int) -> None:
    with clusters.slurm() as environment:
        os.environ.update(environment)
        with _sweep(folder, "slurm", "runs") as running:
            index = folder / "runs/study/index.json"
            eventually(lambda: index.exists() and _done(index) >= cells // 2, 3600)
            (*_, lost) = sorted(clusters.slurm_jobs("RUNNING"))
            clusters.cancel_slurm_job(lost)
            print(f"cancelled a running job after {_done(index)} cells")
            running.wait()
            _show(index)


@contextmanager
def _workers(folder: Path, count: int) -> Iterator[clusters.Dask]:
    folder.mkdir()
    with clusters.dask(folder) as dask:
        for core in sorted(os.sched_getaffinity(0))[:count]:
            dask.add_worker(["taskset", "--cpu-list", str(core)])
        yield dask


@contextmanager
def _sweep(folder: Path, on: str, runs: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*TESTBED, "sweep", "study.yaml", "--on", on, "--runs", runs]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as running:
        try:
            yield running
        finally:
            running.terminate()


def _entries(index: Path) -> list[dict[str, object]]:
    return [*json.loads(index.read_text())["cells"].values()]


def _done(index: Path) -> int:
    return sum(entry["outcome"] is not None for entry in _entries(index))


def _show(index: Path) -> None:
    entries = _entries(index)
    folders = [*index.parent.glob("*/manifest.json")]
    runs = {entry["run"] for entry in entries}
    finished = sum(entry["outcome"] == "after" for entry in entries)
    print(f"{finished} cells done, {len(entries)} entries, {len(runs)} runs, {len(folders)} folders")


if __name__ == "__main__":
    main()
