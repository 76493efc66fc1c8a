"""Time to load a large run, compared with a plain loop over its lines, and time to look at it.

    python -m benchmarks.loading [UPDATES]

Writes a run of UPDATES updates (default: a million, 370 MB) of a hundred clients, and reads it with
`analysis.load`, and record by record with `events.read`: each in a process of its own, so that the
maximum memory of each is known. CPU seconds are those of all threads together.

Then it draws all charts on paper, and runs the commands for finished runs: the limit is a minute for all
of them together.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import multiprocessing
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from agents import events
from analysis.charts import CHARTS, paper
from analysis.load import load

_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
_LIMIT = 60.0
"""Limit in seconds for everything that is done to look at a run of a million updates."""
_EVALUATED = 1000
"""Versions between two evaluations."""
_CLIENTS = [f"device-{number:03d}" for number in range(100)]


def main() -> None:
    updates = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        _write(run, updates)
        size = (run / "events.jsonl").stat().st_size
        print(f"{updates:,} updates, {size / 1e6:.0f} MB")
        print(f"{'':16}{'wall s':>8}{'CPU s':>8}{'MB':>8}")
        results = {}
        for name, read in (("analysis.load", _tables), ("a plain loop", _loop)):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                results[name] = wall, cpu, memory = pool.apply(_measured, (read, run))
            print(f"{name:16}{wall:8.1f}{cpu:8.1f}{memory:8.0f}")
        ours, loops = results.values()
        ratios = [loop / own for own, loop in zip(ours, loops, strict=True)]
        print(f"{'ratio':16}{ratios[0]:8.1f}{ratios[1]:8.1f}{ratios[2]:8.1f}")
        print()
        figure, page, tables = (str(run / name) for name in ("figure.png", "report.html", "tables"))
        everything = {
            "all charts": _charts,
            "testbed report": partial(_command, "report", ("--to", page)),
            "testbed compare": partial(_command, "compare", ("--figure", figure)),
            "testbed export": partial(_command, "export", ("--to", tables)),
        }
        spent = 0.0
        for name, look in everything.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                wall, cpu, memory = pool.apply(_measured, (look, run))
            spent += wall
            print(f"{name:16}{wall:8.1f}{cpu:8.1f}{memory:8.0f}", flush=True)
        print(f"{'together':16}{spent:8.1f}, {_LIMIT / spent:.1f} times within {_LIMIT:g} s")


def _write(run: Path, updates: int) -> None:
    """Write a run: each client's next update begins when its last one was applied; ten make a
    version."""
    draw = random.Random(1)  # noqa: S311
    devices = {
        name: {"group": group, "samples": 600, "importance": 1 / len(_CLIENTS)}
        for name, group in zip(_CLIENTS, itertools.cycle(("fast", "slow")), strict=False)
    }
    facts = {"created": 1.8e9, "outcome": "updates", "runtime": "virtual", "rule": "fedbuff"}
    (run / "manifest.json").write_text(json.dumps({**facts, "task": "mnist-logreg", "devices": devices}))
    begun, base, at, version = [0.0] * len(_CLIENTS), [0] * len(_CLIENTS), 0.0, 0
    with (run / "events.jsonl").open("w") as file:
        file.write(events.to_line(events.RunStarted(0.0, 1.8e9, tuple(_CLIENTS), ())))
        for number in range(updates):
            c, at = draw.randrange(len(_CLIENTS)), at + draw.expovariate(100.0)
            passed, loss = at - begun[c], 2 * draw.random()
            first, last = begun[c] + 0.1 * passed, begun[c] + 0.8 * passed
            record = events.UpdateApplied(
                client=_CLIENTS[c],
                sequence=number,
                kind="delta",
                base_version=base[c],
                applied_version=version + 1,
                staleness=version - base[c],
                weight=0.1,
                samples=200,
                steps=100,
                loss=loss,
                bytes=2984,
                dispatched=begun[c],
                downloaded=first,
                train_start=first,
                train_end=last,
                sent=last,
                arrived=at,
                applied=at,
            )
            file.write(events.to_line(record))
            begun[c], base[c] = at, version
            if number % 10 == 9:
                version += 1
                file.write(events.to_line(events.VersionMade(at, version, 10)))
                if version % _EVALUATED == 0:
                    error = math.exp(-10 * number / updates)
                    file.write(events.to_line(events.Evaluated(at, version, 2.3 * error, 1 - error)))
        file.write(events.to_line(events.RunEnded(at, "updates", version, updates)))


def _tables(run: Path) -> int:
    return len(load(run).updates)


def _loop(run: Path) -> int:
    records = [r for r in events.read(run / "events.jsonl") if isinstance(r, events.UpdateApplied)]
    names = [field.name for field in dataclasses.fields(events.UpdateApplied)]
    return len(pd.DataFrame([dataclasses.astuple(record) for record in records], columns=names))


def _charts(run: Path) -> int:
    """Draw all charts into files."""
    loaded = [load(run)]
    for name, made in CHARTS.items():
        paper.draw(made(loaded)).savefig(run / f"{name}.png")
    return len(CHARTS)


def _command(name: str, options: tuple[str, ...], run: Path) -> int:
    """Run a command of the command line."""
    command = [sys.executable, "-m", "testbed", name, str(run), *options]
    return subprocess.run(command, check=True, stdout=subprocess.DEVNULL).returncode


def _measured(read: Callable[[Path], int], run: Path) -> tuple[float, float, float]:
    """Wall-clock seconds, CPU seconds, and maximum MB, of this process or of a child if that had
    more."""
    begin = time.perf_counter()
    before = [resource.getrusage(who) for who in _WHO]
    read(run)
    took, after = time.perf_counter() - begin, [resource.getrusage(who) for who in _WHO]
    cpu = sum(one.ru_utime + one.ru_stime for one in after)
    cpu -= sum(one.ru_utime + one.ru_stime for one in before)
    return took, cpu, max(one.ru_maxrss for one in after) / 1024


if __name__ == "__main__":
    main()
