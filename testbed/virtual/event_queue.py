"""The clock of virtual time and its event queue."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from agents.timing.nanoseconds import Nanoseconds

SCENARIO, LINK, DEVICE, ARRIVAL = range(4)
"""Ranks of callbacks; at one time, a lower rank comes first."""


class EventQueue:
    """Ordered by time, rank, device, and order of planning."""

    def __init__(self) -> None:
        self.now: Nanoseconds = 0
        self._heap: list[tuple[Nanoseconds, int, int, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def plan(self, time: Nanoseconds, rank: int, index: int, callback: Callable[[], None]) -> None:
        """A past time means now. `index`: position in device order."""
        heapq.heappush(self._heap, (max(self.now, time), rank, index, next(self._count), callback))

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> Nanoseconds | None:
        return self._heap[0][0] if self._heap else None

    def pop_due(self) -> Callable[[], None] | None:
        if self._heap and self._heap[0][0] <= self.now:
            return heapq.heappop(self._heap)[-1]
        return None

    def clear(self) -> None:
        self._heap.clear()
