"""The clock of virtual time, and what is planned on it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from agents.timing.nanoseconds import Nanoseconds

SCENARIO, LINK, DEVICE, ARRIVAL = range(4)
"""Ranks: which callbacks of one time come before which."""


class EventQueue:
    """Callbacks by time, rank, device, and the order that they were planned in."""

    def __init__(self) -> None:
        self.now: Nanoseconds = 0
        self._heap: list[tuple[Nanoseconds, int, int, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def plan(self, time: Nanoseconds, rank: int, index: int, callback: Callable[[], None]) -> None:
        """Call it at `time`, or now where that is over. `index`: the device's, in device order."""
        heapq.heappush(self._heap, (max(self.now, time), rank, index, next(self._count), callback))

    @property
    def next(self) -> Nanoseconds | None:
        """When something is planned next; None where nothing is."""
        return self._heap[0][0] if self._heap else None

    def due(self) -> Callable[[], None] | None:
        """The first callback of now, taken off the queue; None where there is none."""
        if self._heap and self._heap[0][0] <= self.now:
            return heapq.heappop(self._heap)[-1]
        return None

    def clear(self) -> None:
        self._heap.clear()
