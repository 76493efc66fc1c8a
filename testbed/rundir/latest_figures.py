"""The latest figures of a run, for lists of many runs. To be fast, only the end of the run's records is
read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from agents import events
from agents.disk import files

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
