"""The last of a run's records, without reading all of them: what a list of many runs shows of each."""

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
"""That are read of the end of the file; between two evaluations are the records of many updates."""


@dataclass(frozen=True, slots=True)
class LatestFigures:
    """None is what the end of the file does not tell."""

    at: float | None = None
    """Device time of the last record, in seconds."""
    accuracy: float | None = None
    """Of the last evaluation, from 0 to 1, as is `loss`."""
    loss: float | None = None


def latest_figures(path: Path) -> LatestFigures:
    """Of `events.jsonl`. What cannot be read tells nothing."""
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
    """The records whose line begins so, the last one first; lines that are none are passed over."""
    end = tail.rfind(b"\n")  # what follows is still being written
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
