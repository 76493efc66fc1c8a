"""What the aggregator writes for others: its journal (`events.jsonl`) and models."""

from __future__ import annotations

import os
from pathlib import Path

from agents import events
from agents.disk import files
from agents.disk.checksum import Checksum
from agents.models.buffers import Buffers
from agents.models.vectors import Vector
from agents.wire import payloads

_PIECE = 2**20
"""Bytes that are read at once."""


class Journal:
    """Writes records to the file at `path`, after what is there or, where a run is recovered, from byte
    `begin` on: what follows there is written once more, and is the same."""

    def __init__(self, path: Path, begin: int | None = None) -> None:
        path.touch()
        if begin is None:
            _cut_torn_line(path)
        self._file = path.open("r+b")
        self._sum = Checksum()
        left = path.stat().st_size if begin is None else begin
        while left and (piece := self._file.read(min(left, _PIECE))):
            self._sum.update(piece)
            left -= len(piece)
        self._lines: list[str] = []
        """Not in the file yet: it must not have what the log of inputs, written first, lacks."""

    def write(self, *records: events.Record) -> None:
        self._lines.extend(map(events.to_line, records))

    def flush(self) -> None:
        """Hand all to the operating system: readers see it, the disk may not have it yet."""
        written = "".join(self._lines).encode()
        self._sum.update(written)
        self._file.write(written)
        self._file.flush()
        self._lines.clear()

    def sync(self) -> None:
        """`flush`, and put it on the disk."""
        self.flush()
        os.fdatasync(self._file.fileno())

    def size(self) -> int:
        """Bytes that are written, once all is flushed."""
        return self._file.tell()

    def sum(self) -> int:
        """Checksum of what is written, once all is flushed."""
        return self._sum.intdigest()

    def compared(self) -> tuple[bool, list[str]]:
        """Compare the whole lines that the file has from here on with those that are to be flushed:
        whether one is another, and those that are more. The file stays as it is."""
        end = self._file.tell()
        *lines, _torn = self._file.read().split(b"\n")
        self._file.seek(end)
        made = "".join(self._lines).encode().split(b"\n")[:-1]
        differs = any(ours != theirs for ours, theirs in zip(made, lines, strict=False))
        return differs, [line.decode(errors="replace") for line in lines[len(made) :]]

    def cut(self) -> None:
        """Remove what the file has beyond what was written."""
        self.flush()
        self._file.truncate()

    def close(self) -> None:
        self.sync()
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()


def _cut_torn_line(path: Path) -> None:
    """Take away what a crash in mid-write left at the end, so that the next record has its own line."""
    whole = path.read_bytes().rpartition(b"\n")
    os.truncate(path, len(whole[0]) + len(whole[1]))


def save_model(folder: Path, name: str, w: Vector, buffers: Buffers, version: int, schema: str) -> None:
    """Write `folder/<name>.safetensors` to the disk; a crash leaves no half file by that name."""
    metadata = {"version": str(version), "schema": schema}
    files.save(folder / f"{name}.safetensors", payloads.pack(w, metadata, buffers))
