"""Files for readers of the run: the journal (`events.jsonl`) and models."""

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


class Journal:
    """Appends to the journal. In a recovery it starts at byte `begin`, and writes the same lines
    again."""

    def __init__(self, path: Path, begin: int | None = None) -> None:
        path.touch()
        if begin is None:
            _cut_torn_line(path)
        self._path, self._file = path, path.open("r+b")
        self._sum = Checksum()
        left = path.stat().st_size if begin is None else begin
        while left and (piece := self._file.read(min(left, _PIECE))):
            self._sum.update(piece)
            left -= len(piece)
        self._lines: list[str] = []
        """Not written yet, because the log of inputs has to be written first."""

    def write(self, *records: events.Record) -> None:
        self._lines.extend(map(events.to_line, records))

    @property
    def lines(self) -> int:
        """Lines that are not written yet."""
        return len(self._lines)

    def flush(self, lines: int | None = None) -> None:
        """Flush the next `lines` records, or all, to the operating system. Readers then see them, but
        they may not be on the disk yet."""
        written = "".join(self._lines[:lines]).encode()
        self._sum.update(written)
        with files.errors_name(self._path):
            self._file.write(written)
            self._file.flush()
        del self._lines[:lines]

    def sync(self) -> None:
        self.flush()
        os.fdatasync(self._file.fileno())

    def size(self) -> int:
        """Bytes up to the last flush."""
        return self._file.tell()

    def sum(self) -> int:
        """Checksum up to the last flush."""
        return self._sum.intdigest()

    def compare(self) -> tuple[bool, list[str]]:
        """Compare the complete lines after the present position with those that are not flushed. Return
        whether any differs, and the additional lines of the file, which is not changed."""
        end = self._file.tell()
        *lines, _torn = self._file.read().split(b"\n")
        self._file.seek(end)
        made = "".join(self._lines).encode().split(b"\n")[:-1]
        differs = any(ours != theirs for ours, theirs in zip(made, lines, strict=False))
        return differs, [line.decode(errors="replace") for line in lines[len(made) :]]

    def cut(self) -> None:
        """Flush, and remove the rest of the file."""
        self.flush()
        self._file.truncate()

    def close(self) -> None:
        self.sync()
        self._file.close()

    def abandon(self) -> None:
        """Close the file without writing the buffered records."""
        self._file.close()


def _cut_torn_line(path: Path) -> None:
    """A crash may have left it. The next record gets a line of its own."""
    whole = path.read_bytes().rpartition(b"\n")
    os.truncate(path, len(whole[0]) + len(whole[1]))


def save_model(folder: Path, name: str, w: Vector, buffers: Buffers, version: int, schema: str) -> None:
    """Atomically. `w`: shape (d,)."""
    metadata = {"version": str(version), "schema": schema}
    files.save(folder / f"{name}.safetensors", payloads.pack(w, metadata, buffers))
