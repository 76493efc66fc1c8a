"""List of the runs in a folder, as values for programs and as texts for people, with their latest
figures."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from agents import events
from agents.disk import files
from analysis import manifest
from analysis.manifest import Verdict
from testbed.errors import BadInputError
from testbed.rundir import finding
from testbed.rundir.directory import RunDirectory

_FIRST_BYTES, _MAX_BYTES = 2**14, 2**21
"""Bytes to read from the end of the file, at first and at most. The second number is much larger,
because many records may follow the last evaluation."""


@dataclass(frozen=True, slots=True)
class LatestFigures:
    """A figure is None if it is not in the part of the file that was read."""

    at: float | None = None
    """Device time of the last record, in seconds."""
    accuracy: float | None = None
    """From 0 to 1."""
    loss: float | None = None


def latest_figures(path: Path) -> LatestFigures:
    """A figure that cannot be read is None. `path`: of `events.jsonl`."""
    size = _FIRST_BYTES
    with suppress(OSError), files.open_regular(path) as file:
        total = os.fstat(file.fileno()).st_size
        while True:
            file.seek(max(0, total - size))
            tail = file.read(size)
            if (found := _in_tail(tail)).loss is not None or size >= min(total, _MAX_BYTES):
                return found
            size = min(8 * size, _MAX_BYTES)
    return LatestFigures()


def _in_tail(tail: bytes) -> LatestFigures:
    at = next((record.at for record in _backwards(tail, b"{")), None)
    evaluation = next(_backwards(tail, b'{"event":"evaluation",'), None)
    if not isinstance(evaluation, events.Evaluated):
        return LatestFigures(at)
    return LatestFigures(at, _finite(evaluation.accuracy), _finite(evaluation.loss))


def _backwards(tail: bytes, begin: bytes) -> Iterator[events.Record]:
    """Lines that are not records are skipped. A record's line starts with `begin`."""
    end = tail.rfind(b"\n")  # the line after it may be incomplete
    while end > 0:
        start = tail.rfind(b"\n" + begin, 0, end)
        if start < 0 and not tail.startswith(begin):
            return
        line = tail[start + 1 : tail.find(b"\n", start + 1)]
        end = start
        with suppress(ValueError):
            if (record := events.from_line(line.decode())) is not None:
                yield record


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


SORTS = (
    "started",
    "run",
    "rule",
    "task",
    "runtime",
    "devices",
    "duration",
    "accuracy",
    "outcome",
    "verdict",
)


@dataclass(frozen=True, slots=True)
class RunRow:
    run: str
    created: str | None
    """Local time at which the run directory was made."""
    rule: str | None
    task: str | None
    runtime: str | None
    devices: int
    """Number of devices."""
    duration: float | None
    """Seconds of device time so far; None before the run clock starts."""
    accuracy: float | None
    """Test accuracy at the last evaluation, 0 to 1; None if the run was never evaluated."""
    loss: float | None
    """Test loss at the last evaluation; None if the run was never evaluated."""
    outcome: str
    """`running`, `crashed`, `unreadable`, or the reason why the run ended."""
    verdict: Verdict | None
    """Verdict on the run; None until the run has ended."""


def list_runs(runs: Path) -> list[RunRow]:
    """Oldest first."""
    rows = [run_row(RunDirectory(path)) for path in finding.runs_in(runs).values()]
    return sorted(rows, key=lambda row: row.created or "")


def run_row(directory: RunDirectory) -> RunRow:
    last = LatestFigures()
    try:
        entries = directory.read_manifest()
        outcome = entries.get("outcome") or ("running" if directory.controller() else "crashed")
        last = latest_figures(directory.events)
    except BadInputError:
        entries, outcome = {}, "unreadable"
    created = entries.get("created")
    has_ended = entries.get("outcome") and entries.get("runtime")
    return RunRow(
        run=directory.run,
        created=None if created is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created)),
        rule=entries.get("rule"),
        task=entries.get("task"),
        runtime=entries.get("runtime"),
        devices=len(entries.get("devices", {})),
        duration=last.at,
        accuracy=last.accuracy,
        loss=last.loss,
        outcome=outcome,
        verdict=manifest.verdict(entries) if has_ended else None,
    )


def text_row(row: RunRow) -> dict[str, str]:
    """An unknown value is `–`. If the task has no accuracy, the column `accuracy` shows the loss."""
    quality = None if row.loss is None else f"loss {row.loss:.4g}"
    facts = {
        "run": row.run,
        "started": row.created,
        "rule": row.rule,
        "task": row.task,
        "runtime": row.runtime,
        "devices": f"{row.devices:,}" if row.devices else None,
        "duration": None if row.duration is None else f"{row.duration:,.1f} s",
        "accuracy": quality if row.accuracy is None else f"{row.accuracy:.1%}",
        "outcome": events.end_reason(row.outcome),
        "verdict": row.verdict,
    }
    return {name: "–" if fact is None else str(fact) for name, fact in facts.items()}


def select_rows(rows: Sequence[RunRow], sort: str = "started", matching: str = "") -> list[RunRow]:
    """Each word of `matching` must occur in the row as `text_row` formats it. Upper and lower case are
    equal.

    `sort` is one of `SORTS`. The row with the lowest value is first. Rows without a value come before
    all others.
    """
    words = matching.casefold().split()
    found = [
        row for row in rows if all(word in " ".join(text_row(row).values()).casefold() for word in words)
    ]
    pairs = [(sort_value(row, sort), row) for row in found]
    pairs.sort(key=lambda pair: (pair[0] is not None, 0 if pair[0] is None else pair[0]))
    return [row for _, row in pairs]


def sort_value(row: RunRow, column: str) -> Any:
    """Return the value by which `row` is sorted in `column`, one of `SORTS`."""
    return row.created if column == "started" else getattr(row, column)
