"""One direction of the segments that devices share, in the relay. The scheduler uses neither I/O nor a
clock: the time is an argument.

As in the kernel's HTB (`agents.router.segments`), each device has a queue of its own, and each segment a
token bucket. Among the queues whose segments all have tokens, the one that has sent least goes first, so
rates are max-min fair over the devices. Then an item is in flight for the segments' delays.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agents.config import Segment, Way, path_of
from agents.device.link import burst, queue_bytes
from agents.links import background
from testbed.relay.pipe import MAX_PIECE_BYTES, SEGMENT, on_wire

Item = Callable[[], None]
"""Function that is called when its bytes have passed the segments."""
_PACKET = on_wire(SEGMENT)
_STREAM_SECONDS = 0.01
"""Seconds of background traffic that are one item."""
_MAX_LATE_SECONDS = 1.0
"""Transfers that should have arrived longer ago, before a resumed run's start, are left out."""


@dataclass(slots=True)
class _Queue:
    """Queue of a device, or of background traffic."""

    name: str
    """Name of the device; empty for background traffic."""
    segment: str
    is_first: bool = False
    """Whether items go before those of other queues."""
    items: deque[tuple[Item | None, int]] = field(default_factory=deque)
    """Items with their bytes on the wire."""
    waiting: int = 0
    """Bytes on the wire of the items that wait."""
    sent: float = 0.0
    """Bytes on the wire that the queue has sent. A queue that was empty catches up with the others, so
    that it gains nothing from a pause."""
    last_due: float = -math.inf
    """Time in seconds at which the queue's last item is due behind the segments."""


class SegmentScheduler:
    """Shares one direction of a tree of segments. Times are seconds of a monotonic clock."""

    def __init__(
        self,
        segments: Iterable[Segment],
        attached: Mapping[str, str],
        way: Way,
        uniform: Callable[[], float],
    ) -> None:
        """`attached`: segment of each device. `uniform` returns random numbers in [0, 1)."""
        self.segments = {segment.name: segment for segment in segments}
        self._way: Way = way
        self._uniform = uniform
        self._queues = {device: _Queue(device, name) for device, name in attached.items()}
        self._others: set[int] = set()
        self._backlogged: dict[int, _Queue] = {}
        self._free_at = dict.fromkeys(self.segments, -math.inf)
        """Time in seconds from which each segment's bucket has tokens."""
        self._cut: set[str] = set()
        self._under_way: list[tuple[float, int, Item]] = []
        self._numbers = itertools.count()
        self._turn = 0.0
        """`sent` of the queue that has sent last."""
        self.passed: dict[str, Counter[str]] = {name: Counter() for name in self.segments}
        """Bytes on the wire that passed each segment, by device; background traffic by the empty
        name."""

    def path(self, segment: str) -> tuple[Segment, ...]:
        """Return the segments from `segment` to the root."""
        return path_of(segment, self.segments)

    def rate(self, device: str) -> int | None:
        """Return the lowest rate on the device's way in bit/s; None if it is not limited."""
        return self._rate(self._queues[device])

    def _rate(self, queue: _Queue) -> int | None:
        rates = (one.rate(self._way) for one in self.path(queue.segment))
        return min((rate for rate in rates if rate is not None), default=None)

    def is_full(self, device: str) -> bool:
        """Whether the device has to wait until its queue has room, or until its segment is restored."""
        queue = self._queues[device]
        path = self.path(queue.segment)
        if not self._cut.isdisjoint(one.name for one in path):
            return True
        return queue.waiting >= self._limit(queue)

    def _limit(self, queue: _Queue) -> int:
        limits = [
            (rate, one.queue or queue_bytes(rate))
            for one in self.path(queue.segment)
            if (rate := one.rate(self._way)) is not None
        ]
        return min(limits)[1] if limits else 64 * MAX_PIECE_BYTES

    def put(self, device: str, item: Item, size: int, now: float) -> None:
        """Add an item of `size` bytes of payload to the device's queue."""
        self._put(self._queues[device], item, on_wire(size), now)

    def _put(self, queue: _Queue, item: Item | None, wire: int, now: float) -> None:
        self.advance(now)
        if not queue.items:
            queue.sent = max(queue.sent, self._turn)
            self._backlogged[id(queue)] = queue
        queue.items.append((item, wire))
        queue.waiting += wire

    def add_queue(self, segment: str, *, is_first: bool) -> _Queue:
        """Return a new queue for background traffic on `segment`."""
        return _Queue("", segment, is_first)

    def offer(self, queue: _Queue, wire: int, now: float, *, may_wait: bool) -> None:
        """Add `wire` bytes of background traffic. Unless they `may_wait`, they are lost if the queue is
        full or the segment is cut."""
        cut = not self._cut.isdisjoint(one.name for one in self.path(queue.segment))
        if may_wait or (not cut and queue.waiting < self._limit(queue)):
            self._put(queue, None, wire, now)

    def remove(self, queue: _Queue) -> None:
        """Remove background traffic that still waits."""
        queue.items.clear()
        queue.waiting = 0
        self._backlogged.pop(id(queue), None)

    def advance(self, now: float) -> None:
        """Let all items pass that may have passed by `now`."""
        while True:
            ready = [(self._pass_time(queue), queue) for queue in self._backlogged.values()]
            first = min((at for at, _ in ready), default=math.inf)
            if first > now:
                return
            # Items that had to wait pass at the time at which tokens came, others now.
            queue = min(
                (queue for at, queue in ready if at <= first), key=lambda one: (not one.is_first, one.sent)
            )
            self._pass(queue, max(first, self._turned_at(queue, now)))

    def _turned_at(self, queue: _Queue, now: float) -> float:
        path = self.path(queue.segment)
        return now if all(self._free_at[one.name] == -math.inf for one in path) else -math.inf

    def _pass_time(self, queue: _Queue) -> float:
        path = self.path(queue.segment)
        if not self._cut.isdisjoint(one.name for one in path):
            return math.inf
        return max(self._free_at[one.name] for one in path)

    def _pass(self, queue: _Queue, at: float) -> None:
        item, wire = queue.items.popleft()
        queue.waiting -= wire
        if not queue.items:
            del self._backlogged[id(queue)]
        queue.sent += wire
        if not queue.is_first:
            self._turn = queue.sent
        due = at
        for segment in self.path(queue.segment):
            self.passed[segment.name][queue.name] += wire
            if (rate := segment.rate(self._way)) is not None:
                saved = at - 8 * burst(rate) / rate
                self._free_at[segment.name] = max(self._free_at[segment.name], saved) + 8 * wire / rate
            due += max(0.0, segment.rtt / 2 + segment.jitter * (2 * self._uniform() - 1))
        if item is not None:
            queue.last_due = max(queue.last_due, due)
            heapq.heappush(self._under_way, (queue.last_due, next(self._numbers), item))

    def pop_due(self, now: float) -> list[Item]:
        """Remove and return the items that are due by `now`, in order."""
        self.advance(now)
        found = []
        while self._under_way and self._under_way[0][0] <= now:
            found.append(heapq.heappop(self._under_way)[2])
        return found

    def next_due(self) -> float | None:
        """Return the time of the next event; None if there is none."""
        times = [self._pass_time(queue) for queue in self._backlogged.values()]
        if self._under_way:
            times.append(self._under_way[0][0])
        first = min(times, default=math.inf)
        return None if first == math.inf else first
