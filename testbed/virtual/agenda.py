"""What is to happen in virtual time, and when."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

SCENARIO, LINK, DEVICE, ARRIVAL = range(4)
"""Ranks: what comes before what at one time."""
SAME_INSTANT = 1e-9
"""Seconds: times are counted in whole nanoseconds, so that sums of equal periods meet."""


class Agenda:
    """The clock, and the heap of events: by time, rank, device and the order they were planned in."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def plan(self, time: float, rank: int, index: int, happens: Callable[[], None]) -> None:
        """Have it happen at `time`, or now where that is over. `index`: the device's, in their order."""
        at = max(self.now, rounded(time))
        heapq.heappush(self._heap, (at, rank, index, next(self._count), happens))

    @property
    def next(self) -> float | None:
        """When something happens next; None where nothing is planned."""
        return self._heap[0][0] if self._heap else None

    def due(self) -> Callable[[], None] | None:
        """What happens now, the first of it, taken off the agenda; None where nothing does."""
        if self._heap and self._heap[0][0] <= self.now:
            return heapq.heappop(self._heap)[-1]
        return None

    def clear(self) -> None:
        self._heap.clear()


def rounded(time: float) -> float:
    return round(time, 9)
