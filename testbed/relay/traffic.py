"""Counters of each device's traffic, written by the relay and read by the controller.

Both map the same file: counting costs the relay an addition, and reading costs it nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from pathlib import Path

_COUNTER_BYTES = 8
COUNTED = ("sent", "received")
"""What is counted of a device, in the order of the file."""


class Traffic:
    """Bytes on the wire of each device, since the relay's start."""

    def __init__(self, path: Path, devices: Iterable[str]) -> None:
        """`path` is made if it is not there; all who map it name the same `devices`, in one order."""
        self._places = {name: len(COUNTED) * number for number, name in enumerate(devices)}
        size = _COUNTER_BYTES * len(COUNTED) * len(self._places)
        with path.open("ab+") as file:
            file.truncate(size)
            self._counts = memoryview(mmap.mmap(file.fileno(), size)).cast("Q")

    def counter(self, device: str, counted: str) -> Callable[[int], None]:
        """A function that adds to the bytes that `device` has `sent` or `received`."""
        counts, place = self._counts, self._places[device] + COUNTED.index(counted)

        def count(size: int) -> None:
            counts[place] += size

        return count

    def of(self, device: str) -> dict[str, int]:
        """Bytes by name, as in telemetry."""
        place = self._places[device]
        return dict(zip(COUNTED, self._counts[place : place + len(COUNTED)], strict=True))
