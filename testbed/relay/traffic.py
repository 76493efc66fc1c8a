"""Counters of each device's traffic and queues, in a file that the relay and the controller map.
Counting costs the relay one addition, reading costs it nothing."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from agents.wire.messages import QueueUse

_COUNTER_BYTES = 8
COUNTED = ("sent", "received")
_QUEUES = ("uplink", "downlink")
_COUNTERS = len(COUNTED) + 3 * len(_QUEUES)
"""Per device: bytes sent and received, then the fields of QueueUse for each queue, with the time in
µs."""


class Traffic:
    """Bytes on the wire of each device since the relay's start, and the use of its queues."""

    def __init__(self, path: Path, devices: Iterable[str]) -> None:
        """Create the file if it is missing. Every process must pass the same `devices` in the same
        order."""
        self._places = {name: _COUNTERS * number for number, name in enumerate(devices)}
        size = _COUNTER_BYTES * _COUNTERS * len(self._places)
        with path.open("ab+") as file:
            file.truncate(size)
            self._counts = memoryview(mmap.mmap(file.fileno(), size)).cast("Q")

    def counter(self, device: str, counted: str) -> Callable[[int], None]:
        """Return a function that adds to the bytes `sent` or `received`."""
        counts, place = self._counts, self._places[device] + COUNTED.index(counted)

        def count(size: int) -> None:
            counts[place] += size

        return count

    def record(self, device: str, uses: Sequence[QueueUse]) -> None:
        """`uses`: up and down."""
        place = self._places[device] + len(COUNTED)
        for use in uses:
            self._counts[place] = round(1e6 * use.busy)
            self._counts[place + 1], self._counts[place + 2] = use.left, use.allowed
            place += 3

    def telemetry_fields(self, device: str) -> dict[str, Any]:
        """Queues without traffic are left out."""
        place = self._places[device]
        counts = self._counts[place : place + _COUNTERS]
        fields: dict[str, Any] = dict(zip(COUNTED, counts[: len(COUNTED)], strict=True))
        for index, name in enumerate(_QUEUES):
            start = len(COUNTED) + 3 * index
            busy, left, allowed = counts[start : start + 3]
            if busy:
                fields[name] = QueueUse(busy / 1e6, left, allowed)
        return fields
