"""A run directory as tables: of a finished run, or of one still going.

All times are in seconds of device time since the run clock started; sizes in bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from agents import events


@dataclass(frozen=True, slots=True)
class Run:
    """One run. A table has one row per record, and the record's fields (`agents.events`) as columns."""

    path: Path
    manifest: Mapping[str, Any]
    topology: Mapping[str, Any]
    started: events.RunStarted | None
    """The first time, of a run that was resumed."""
    ended: events.RunEnded | None
    """None while the run goes on (a resumed one too), and where a crash ended it."""
    updates: pd.DataFrame
    versions: pd.DataFrame
    evaluations: pd.DataFrame
    statuses: pd.DataFrame
    rejected: pd.DataFrame
    notes: pd.DataFrame
    telemetry: pd.DataFrame
    """What the devices sent, `device` and `at` among it; `at` is the device's own monotonic clock."""

    @property
    def duration(self) -> float:
        """Seconds until the run ended, or until its last record where it has not."""
        if self.ended is not None:
            return self.ended.at
        ats = [self.updates["applied"]]
        ats += [
            t["at"] for t in (self.versions, self.evaluations, self.statuses, self.rejected, self.notes)
        ]
        return max((float(at.max()) for at in ats if len(at)), default=0.0)


def load(path: Path) -> Run:
    """Read the run directory `path`. What is not written yet is empty, a torn last line is left out.

    Raises FileNotFoundError where there is no run, ValueError, naming the line, for what cannot be read.
    """
    manifest = _json(path / "manifest.json")
    if (version := manifest.get("format", events.FORMAT)) > events.FORMAT:
        raise ValueError(f"{path}: format {version} is newer than this program's, {events.FORMAT}")
    recorded = path / "events.jsonl"
    records = list(events.read(recorded)) if recorded.exists() else []
    clock = [r for r in records if isinstance(r, events.RunStarted | events.RunEnded)]
    return Run(
        path=path,
        manifest=manifest,
        topology=_yaml(path / "topology.yaml"),
        started=next((r for r in clock if isinstance(r, events.RunStarted)), None),
        ended=next((r for r in clock[-1:] if isinstance(r, events.RunEnded)), None),
        updates=_table(events.UpdateApplied, records),
        versions=_table(events.VersionMade, records),
        evaluations=_table(events.Evaluated, records),
        statuses=_table(events.ClientStatus, records),
        rejected=_table(events.UpdateRejected, records),
        notes=_table(events.Note, records),
        telemetry=_json_lines(path / "telemetry.jsonl"),
    )


def _table(kind: type[events.Record], records: Iterable[events.Record]) -> pd.DataFrame:
    rows = [dataclasses.astuple(record) for record in records if isinstance(record, kind)]
    return pd.DataFrame(rows, columns=[field.name for field in dataclasses.fields(kind)])


def _json(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def _yaml(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}


def _json_lines(path: Path) -> pd.DataFrame:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["device", "at"])
