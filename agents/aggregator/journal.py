"""`events.jsonl` as the aggregator writes it: on disk before anyone hears of a new version."""

from __future__ import annotations

import os
from pathlib import Path

from agents import events


class Journal:
    """Appends records; `sync` makes them outlive a crash."""

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
