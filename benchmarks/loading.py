"""How long a large run takes to load, against a plain loop over its lines.

    python -m benchmarks.loading [UPDATES]

Writes an event log of so many updates (a million, 370 MB, unless told) of a hundred clients, and reads
it with `analysis.load` and with `events.read`, record by record: each in a process of its own, so that
the most memory that it held can be told. CPU seconds are those of all threads together.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from agents import events
from analysis.load import load

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


def _write(run: Path, updates: int) -> None:
    """Each client's next update begins where its last one was applied; ten make a version."""
    draw = random.Random(1)  # noqa: S311
    (run / "manifest.json").write_text(json.dumps({"devices": {name: {} for name in _CLIENTS}}))
    begun, base, at, version = [0.0] * len(_CLIENTS), [0] * len(_CLIENTS), 0.0, 0
    with (run / "events.jsonl").open("w") as file:
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


def _tables(run: Path) -> int:
    return len(load(run).updates)


def _loop(run: Path) -> int:
    records = [r for r in events.read(run / "events.jsonl") if isinstance(r, events.UpdateApplied)]
    names = [field.name for field in dataclasses.fields(events.UpdateApplied)]
    return len(pd.DataFrame([dataclasses.astuple(record) for record in records], columns=names))


def _measured(read: Callable[[Path], int], run: Path) -> tuple[float, float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    read(run)
    took = time.perf_counter() - wall, time.process_time() - cpu
    return *took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
