"""The run directories of a folder as a list: facts for programs, words for people."""

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
"""What a list can be sorted by."""


def listing(runs: Path) -> list[dict[str, Any]]:
    """One row for each run directory in `runs`, oldest first."""
    found = runs.glob("*/manifest.json") if runs.is_dir() else []
    rows = [row(RunDirectory(path.parent)) for path in sorted(found)]
    return sorted(rows, key=lambda row: row["created"] or "")


def row(directory: RunDirectory) -> dict[str, Any]:
    """Name, outcome, verdict (None of a run that has not ended) and other facts of one run: `duration`
    in seconds of device time so far, `accuracy` (0 to 1) and `loss` of its last evaluation. None is what
    is not known."""
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


def told(row: Mapping[str, Any]) -> dict[str, str]:
    """A row for people. Where a task has no accuracy, the loss is told instead."""
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


def arranged(
    rows: Sequence[dict[str, Any]], sort: str = "started", matching: str = ""
) -> list[dict[str, Any]]:
    """Rows with every word of `matching` in what they tell people, sorted by one of `SORTS`, the lowest
    first; first those of which it is not known."""
    words = matching.casefold().split()
    found = [
        row for row in rows if all(word in " ".join(told(row).values()).casefold() for word in words)
    ]
    key = {"started": "created"}.get(sort, sort)
    return sorted(found, key=lambda row: (row[key] is not None, row[key] if row[key] is not None else 0))
