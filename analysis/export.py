"""Export of runs as files: tables, and a trace for Perfetto."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import msgspec
import pandas as pd
from pyarrow import parquet

from analysis import columns, device_states, summary
from analysis.features import PARTS
from analysis.load import Run


def export_runs(
    runs: Iterable[Run], folder: str | Path, form: Literal["parquet", "csv"] = "parquet"
) -> Iterator[Path]:
    """Write `<folder>/<run>/<table>.<form>` for each run, and then `<folder>/runs.<form>`.

    `runs.<form>` has one row per run; `run` is the name of its folder. Files are yielded when they are
    written. Raises ValueError for another `form`, and OSError if a file cannot be written.
    """
    rows: list[dict[str, Any]] = []
    for run in runs:
        yield from run.export(Path(folder) / run.name, form)
        rows.append(_row(run))
    path = Path(folder) / f"runs.{form}"
    table = pd.DataFrame(rows)
    if form == "csv":
        table.to_csv(path, index=False)
    else:
        parquet.write_table(columns.with_metadata("runs", table), path)
    yield path


def _row(run: Run) -> dict[str, Any]:
    """Settings and results (`summary.Headline`). `changes`: settings that a sweep has changed, as
    JSON."""
    manifest = run.manifest
    changes = manifest.get("changes")
    return {
        "run": run.name,
        "label": manifest.get("label"),
        "task": manifest.get("task"),
        "runtime": manifest.get("runtime"),
        "seed": manifest.get("seed"),
        "changes": None if changes is None else json.dumps(changes, default=str),
        "verdict": summary.verdict(run),
        **asdict(summary.headline(run)),
    }


# Export of a run for Perfetto (ui.perfetto.dev), in Google's "Trace Event Format", which Perfetto reads
# (perfetto.dev/docs/getting-started/other-formats).
#
# Times in the file are device time in microseconds. The aggregator is one process with a track of the
# versions. Each device group is one process, with one thread per device; the slices of a thread are the
# device's states (`device_states.timeline`). An arrow leads from each applied update to its version.
# Counters: CPU use, sending and receiving rate, memory and figures of features of each device, and the
# model's accuracy and loss. Actions on devices and rejected updates are instants.

_SERVER = 1
"""Process id of the aggregator. The groups have the following ones."""
_MICROSECONDS = 1e6
_HIDDEN = frozenset({"wait"})
"""States without a slice: empty space shows that a device waits."""
_COUNTERS = {"cpu": ("CPU", "cores"), "sent": ("sent", "byte/s"), "received": ("received", "byte/s")}
"""Cumulative column of the telemetry -> title and unit of its counter, which shows the growth per
second."""
_UPDATE_FIELDS = ("sequence", "base_version", "applied_version", "staleness", "weight", "loss", "bytes")
"""Shown by an update's training slice."""


def write_trace(run: Run, path: str | Path) -> Path:
    """Compressed with gzip. Raises OSError."""
    encode = msgspec.json.Encoder().encode
    with gzip.open(path, "wb", compresslevel=3) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(trace_events(run)):
            file.write(b",\n" * (number > 0) + encode(event))
        file.write(b"\n]}\n")
    return Path(path)


def trace_events(run: Run) -> Iterator[dict[str, Any]]:
    clients = [str(name) for name in run.updates["client"].cat.categories]
    groups = dict(zip(run.devices["device"].astype(str), run.devices["group"].astype(str), strict=True))
    processes = {
        group: _SERVER + 1 + place for place, group in enumerate(dict.fromkeys(groups.values()))
    }
    tracks = {
        name: {"pid": processes.get(groups.get(name, ""), _SERVER), "tid": 1 + place}
        for place, name in enumerate(clients)
    }
    yield from _names(run, processes, tracks)
    yield from _versions(run)
    yield from _states(run, tracks)
    yield from _counters(run, tracks)
    yield from _instants(run, tracks)


def _names(
    run: Run, processes: dict[str, int], tracks: dict[str, dict[str, int]]
) -> Iterator[dict[str, Any]]:
    """Yield the events that name processes and threads, in the order of the plan."""
    for name, pid in {f"aggregator ({run.name})": _SERVER, **processes}.items():
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    yield {"ph": "M", "pid": _SERVER, "tid": 0, "name": "thread_name", "args": {"name": "versions"}}
    for name, track in tracks.items():
        yield {"ph": "M", **track, "name": "thread_name", "args": {"name": name}}
        sort = {"sort_index": track["tid"]}
        yield {"ph": "M", **track, "name": "thread_sort_index", "args": sort}


def _versions(run: Run) -> Iterator[dict[str, Any]]:
    """Slices of no duration, and the counters of the evaluations."""
    for at, version, updates in run.versions[["at", "version", "updates"]].itertuples(index=False):
        yield {
            "ph": "X",
            "pid": _SERVER,
            "tid": 0,
            "ts": at * _MICROSECONDS,
            "dur": 0,
            "name": f"version {version}",
            "cat": "version",
            "args": {"updates": updates},
        }
    for at, loss, accuracy in run.evaluations[["at", "loss", "accuracy"]].itertuples(index=False):
        for name, value in (("loss", loss), ("accuracy", accuracy)):
            if math.isfinite(value):
                yield _counter({"pid": _SERVER}, name, at, value)


def _states(run: Run, tracks: dict[str, dict[str, int]]) -> Iterator[dict[str, Any]]:
    """A slice for each state, and an arrow from each upload to its version."""
    details = run.updates[list(_UPDATE_FIELDS)].to_dict("records")
    at = {version: time for time, version in run.versions[["at", "version"]].itertuples(index=False)}
    for device, state, begin, end, update in device_states.timeline(run).itertuples(index=False):
        if state in _HIDDEN or device not in tracks:
            continue
        place = {**tracks[device], "name": state, "cat": "state"}
        args = _finite(details[update]) if update >= 0 else {}
        span = {"ts": begin * _MICROSECONDS, "dur": (end - begin) * _MICROSECONDS}
        yield {"ph": "X", **place, **span, "args": args}
        made = at.get(args.get("applied_version")) if state == "upload" else None
        if made is not None:
            arrow = {"id": int(update), "name": "update", "cat": "update"}
            yield {"ph": "s", **tracks[device], **arrow, "ts": begin * _MICROSECONDS}
            yield {"ph": "f", "bp": "e", "pid": _SERVER, "tid": 0, **arrow, "ts": made * _MICROSECONDS}


def _counters(run: Run, tracks: dict[str, dict[str, int]]) -> Iterator[dict[str, Any]]:
    """Telemetry. Perfetto shows counters per process, so each name begins with the device."""
    samples = run.telemetry[run.telemetry["at"] >= 0]
    for device, own in samples.groupby("device", observed=True):
        if (track := tracks.get(str(device))) is None:
            continue
        process = {"pid": track["pid"]}
        for at, used in own[["at", "memory"]].dropna().itertuples(index=False):
            yield _counter(process, f"{device} memory (byte)", at, used)
        for column, (title, unit) in _COUNTERS.items():
            for at, value in _growth(own, column):
                yield _counter(process, f"{device} {title} ({unit})", at, value)
    for counter in (one for part in PARTS for one in part.counters):
        table = run.more[counter.table]
        known = table.loc[table["at"] >= 0, ["device", "at", counter.column]].dropna()
        for device, at, value in known.itertuples(index=False):
            if (track := tracks.get(str(device))) is not None:
                name = f"{device} {counter.name}"
                yield _counter({"pid": track["pid"]}, name, at, counter.scale * value)


def _growth(samples: pd.DataFrame, column: str) -> Iterator[tuple[float, float]]:
    """Time of the first of two consecutive samples, and growth per second. A counter restarts from 0
    when the device restarts."""
    known = samples[["at", column]].dropna()
    rows = list(known.itertuples(index=False))
    for (begin, before), (end, after) in itertools.pairwise(rows):
        if end > begin:
            yield begin, (after - before if after >= before else after) / (end - begin)
    if len(rows) > 1:
        yield rows[-1][0], 0.0


def _instants(run: Run, tracks: dict[str, dict[str, int]]) -> Iterator[dict[str, Any]]:
    """Actions on devices and rejected updates."""
    acted = run.scenario[["at", "device", "action", "details"]].itertuples(index=False)
    rejected = run.rejected[["at", "client", "reason"]].itertuples(index=False)
    found = [(at, device, action, {"details": str(details)}) for at, device, action, details in acted]
    found += [(at, client, "rejected", {"reason": str(reason)}) for at, client, reason in rejected]
    for at, device, name, args in found:
        track = tracks.get(str(device), {"pid": _SERVER, "tid": 0})
        ts = at * _MICROSECONDS
        yield {"ph": "i", **track, "ts": ts, "s": "t", "name": str(name), "cat": "event", "args": args}


def _counter(process: dict[str, int], name: str, at: float, value: float) -> dict[str, Any]:
    return {"ph": "C", **process, "name": name, "ts": at * _MICROSECONDS, "args": {"value": value}}


def _finite(fields: dict[Any, Any]) -> dict[str, Any]:
    """Return `fields` without values that are not finite, which JSON cannot express."""
    return {
        str(name): value
        for name, value in fields.items()
        if not isinstance(value, float) or math.isfinite(value)
    }
