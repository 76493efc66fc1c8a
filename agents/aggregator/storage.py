"""What the aggregator keeps in the run directory: its journal (`events.jsonl`) and models, and what a
resumed run reads of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from agents import events, files, wire
from agents.nanoseconds import Nanoseconds, from_seconds
from agents.vectors import Vector


class Journal:
    """Appends records to the file at `path`; `sync` makes them outlive a crash."""

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._new_version = False

    def write(self, record: events.Record) -> None:
        self._file.write(events.to_line(record))
        self._new_version |= isinstance(record, events.VersionMade | events.RunEnded)

    def flush(self) -> None:
        """Hand all to the operating system: readers see it, the disk may not have it yet."""
        self._file.flush()

    def sync(self) -> None:
        """`flush` and, where there is a new version, put it on the disk."""
        self.flush()
        if self._new_version:
            os.fdatasync(self._file.fileno())
            self._new_version = False

    def close(self) -> None:
        self.sync()
        self._file.close()


def _cut_torn_line(path: Path) -> None:
    """Take away what a crash in mid-write left at the end, so that the next record has its own line."""
    if path.exists():
        whole = path.read_bytes().rpartition(b"\n")
        os.truncate(path, len(whole[0]) + len(whole[1]))


def save_model(folder: Path, name: str, w: Vector, version: int, schema: str) -> None:
    """Write `folder/<name>.safetensors` to the disk; a crash leaves no half file by that name."""
    metadata = {"version": str(version), "schema": schema}
    files.save(folder / f"{name}.safetensors", wire.pack(w, metadata))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    version: int
    w: Vector
    """Shape (d,); read-only."""


def newest_checkpoint(directory: Path) -> Checkpoint:
    """The model of the highest version in `models/`. Raises ValueError where there is none."""
    newest = max((directory / "models").glob("*.safetensors"), key=_version, default=None)
    if newest is None:
        raise ValueError(f"{directory / 'models'} holds no model to resume from")
    return Checkpoint(_version(newest), wire.unpack(newest.read_bytes())[0])


def _version(path: Path) -> int:
    """Of the model in the file, of which only the header is read."""
    with safe_open(path, framework="numpy") as file:
        return int(file.metadata()["version"])


@dataclass(frozen=True, slots=True)
class Past:
    """What an earlier part of the run did; nothing, for a new one."""

    at: Nanoseconds = 0
    """Device time of the last record."""
    updates: int = 0
    """Updates applied."""
    version: int = 0
    """The last version that was made. The count goes on from here, so that no number comes twice."""


def past(directory: Path, checkpoint: Checkpoint) -> Past:
    """State of the run, read from `events.jsonl`. Raises ValueError where it cannot be read.

    No version number is given twice. So where a crash came between the record of an update and that of
    the version it went into, the update's word counts, and where it came between a checkpoint and the
    records of what went into it, the checkpoint's.
    """
    at, updates, version = 0.0, 0, checkpoint.version
    for record in events.read(directory / "events.jsonl"):
        at = max(at, record.at)
        if isinstance(record, events.UpdateApplied):
            updates += 1
            version = max(version, record.applied_version)
        elif isinstance(record, events.VersionMade):
            version = max(version, record.version)
    return Past(from_seconds(at), updates, version)
