"""What a run directory holds for carrying on where the run stopped, in order or by a crash."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from agents import events, wire
from agents.nanoseconds import Nanoseconds, from_seconds
from agents.vectors import Vector


@dataclass(frozen=True, slots=True)
class Checkpoint:
    version: int
    w: Vector
    """Shape (d,); read-only."""


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
