"""List of the runs in a folder, as values for programs and as texts for people."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agents import events
from analysis import manifest
from testbed.errors import BadInputError
from testbed.rundir.directory import RunDirectory
from testbed.rundir.latest_figures import LatestFigures, latest_figures

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


def list_runs(runs: Path) -> list[dict[str, Any]]:
    """One row per run directory, oldest first."""
    found = runs.glob("*/manifest.json") if runs.is_dir() else []
    rows = [run_row(RunDirectory(path.parent)) for path in sorted(found)]
    return sorted(rows, key=lambda row: row["created"] or "")


def run_row(directory: RunDirectory) -> dict[str, Any]:
    """An unknown fact is None. `duration` is the device time so far, in seconds. `accuracy` (from 0 to
    1) and `loss` come from the last evaluation. `verdict` is None until the run has ended."""
    last = LatestFigures()
    try:
        entries = directory.read_manifest()
        outcome = entries.get("outcome") or ("running" if directory.controller() else "crashed")
        last = latest_figures(directory.events)
    except BadInputError:
        entries, outcome = {}, "unreadable"
    created = entries.get("created")
    return {
        "run": directory.run,
        "created": created and time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created)),
        "rule": entries.get("rule"),
        "task": entries.get("task"),
        "runtime": entries.get("runtime"),
        "devices": len(entries.get("devices", {})),
        "duration": last.at,
        "accuracy": last.accuracy,
        "loss": last.loss,
        "outcome": outcome,
        "verdict": manifest.verdict(entries)
        if entries.get("outcome") and entries.get("runtime")
        else None,
    }


def text_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Format a row of `run_row`; an unknown value is `–`. If the task has no accuracy, the column
    `accuracy` shows the loss."""
    accuracy, loss = row["accuracy"], row["loss"]
    quality = None if loss is None else f"loss {loss:.4g}"
    facts = {
        "run": row["run"],
        "started": row["created"],
        "rule": row["rule"],
        "task": row["task"],
        "runtime": row["runtime"],
        "devices": f"{row['devices']:,}" if row["devices"] else None,
        "duration": None if row["duration"] is None else f"{row['duration']:,.1f} s",
        "accuracy": quality if accuracy is None else f"{accuracy:.1%}",
        "outcome": events.end_reason(row["outcome"]),
        "verdict": row["verdict"],
    }
    return {name: "–" if fact is None else str(fact) for name, fact in facts.items()}


def select_rows(
    rows: Sequence[dict[str, Any]], sort: str = "started", matching: str = ""
) -> list[dict[str, Any]]:
    """Rows are those of `run_row`. Each word of `matching` must occur in the row as `text_row` formats
    it. Upper and lower case are equal.

    `sort` is one of `SORTS`. The row with the lowest value is first. Rows without a value come before
    all others.
    """
    words = matching.casefold().split()
    found = [
        row for row in rows if all(word in " ".join(text_row(row).values()).casefold() for word in words)
    ]
    key = {"started": "created"}.get(sort, sort)
    return sorted(found, key=lambda row: (row[key] is not None, row[key] if row[key] is not None else 0))
