"""Readers of a run directory's files. A reader can be used while the run still writes to its file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from agents import events
from agents.disk import files

_JUST_NOW = 2**20
"""Bytes at the end of `events.jsonl` in which `last_start` searches. A run writes less in a few tenths
of a second."""


class _GrowingFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def skip_to_last(self, size: int) -> None:
        """Lines that begin before the last `size` bytes are skipped."""
        with suppress(FileNotFoundError), files.open_regular(self.path) as file:
            file.seek(max(0, self.path.stat().st_size - size))
            if file.tell():
                file.readline()
            self._offset = file.tell()

    def read(self, most: int = -1) -> list[str]:
        """Complete lines in the next `most` bytes of the file (−1 for all bytes). An incomplete line is
        left for the next call."""
        lines = b""
        with suppress(FileNotFoundError), files.open_regular(self.path) as file:
            file.seek(self._offset)
            lines = file.read(most).rpartition(b"\n")[0]
        if not lines:
            return []
        self._offset += len(lines) + 1
        return lines.decode(errors="replace").split("\n")


def last_start(path: Path) -> events.RunStarted | None:
    """Start of the run's newest segment. Only the last MiB of `events.jsonl`, the file `path`, is
    searched. The result is None if the segment has not started yet, or if too many records follow its
    start."""
    lines = _GrowingFile(path)
    lines.skip_to_last(_JUST_NOW)
    for line in reversed(lines.read()):
        if f'"{events.RunStarted.event}"' in line:
            with suppress(ValueError):
                record = events.from_line(line)
                if isinstance(record, events.RunStarted):
                    return record
    return None


class RecordFollower:
    """Reads a growing `events.jsonl`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = _GrowingFile(path)

    def read(self, most: int = -1) -> list[events.Record]:
        """Records added since the last call. An incomplete line is left for the next call.

        `most` is the maximum number of bytes to read, or −1 for all. It must be larger than the longest
        line. Raises ValueError, with the file's name, if a line is not a record.
        """
        try:
            records = [events.from_line(line) for line in self._lines.read(most)]
        except ValueError as error:
            raise ValueError(f"{self._lines.path}: {error}") from error
        return [record for record in records if record is not None]


class Samples:
    """Reads a growing `telemetry.jsonl`."""

    def __init__(self, path: Path, last: int | None = None) -> None:
        """`last`: number of bytes before the end of the file at which to start reading."""
        self._lines = _GrowingFile(path)
        if last is not None:
            self._lines.skip_to_last(last)
        self.zero: float | None = None
        """Unix time at which the clock of the samples read so far was 0; None if unknown."""

    def read(self) -> list[dict[str, Any]]:
        """New samples, each with `device` and `at`. Other lines are skipped.

        `at` is a time in seconds on the host's monotonic clock. Times of an earlier segment are
        converted to the clock of the newest segment.
        """
        samples: list[dict[str, Any]] = []
        for line in self._lines.read():
            with suppress(ValueError):
                match files.from_json(line):
                    case {"device": str(), "at": int() | float() as at} as sample:
                        if abs(at) <= events.LARGEST:
                            samples.append(sample)
                    case {"monotonic_zero": int() | float() as zero} if abs(zero) <= events.LARGEST:
                        for sample in samples:
                            sample["at"] += (zero if self.zero is None else self.zero) - zero
                        self.zero = zero
        return samples
