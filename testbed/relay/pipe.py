"""One direction of a shaped link. Items of payload enter the pipe, and leave when they are due. The
module uses neither I/O nor a clock: the time is an argument.

As in the kernel, each item first waits in a queue for a token bucket, which counts bytes on the wire.
Then the item is in flight for the link's delay. Items keep their order, and none is lost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from agents.device.backlog import Backlog
from agents.device.link import burst
from agents.wire.messages import QueueUse

T = TypeVar("T")

SEGMENT = 1448
"""Length of the payload of a full packet in bytes."""
_HEADERS = 66
"""Number of bytes that Ethernet, IP and TCP add to each packet."""
_PACKET = SEGMENT + _HEADERS
_QUEUE_SECONDS = 0.2
"""Size of the queue, as seconds of traffic at the link's rate. The kernel's queue has the same size
(agents.device.link)."""
_MIN_QUEUE_BYTES = 12 * _PACKET
MAX_PIECE_BYTES = 64 * 1024
"""Maximum payload of an item in bytes, even on the fastest link."""
_MAX_BYTES = 64 * 2**20
"""Maximum number of payload bytes in the pipe, bytes in flight included. This limit applies even if the
link has no rate."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties of one direction of a link."""

    rate: int | None = None
    """Rate on the wire, headers included, in bit/s; None if unlimited."""
    delay: float = 0.0
    """Delay in seconds."""
    jitter: float = 0.0
    """Jitter in seconds. The delay of each piece is uniformly distributed in delay ± jitter, but never
    below 0."""


def largest_piece(rate: int | None) -> int:
    """Return the maximum payload of an item in bytes on a link of `rate` bit/s; None for an unlimited
    rate."""
    if rate is None:
        return MAX_PIECE_BYTES
    return min(burst(rate) // _PACKET * SEGMENT, MAX_PIECE_BYTES)


def on_wire(size: int) -> int:
    """Return the number of bytes on the wire, with packet headers, for `size` bytes of TCP payload."""
    return size + _HEADERS * -(-size // SEGMENT)


class _QueuedItem(NamedTuple, Generic[T]):
    item: T
    size: int
    """Length of the payload in bytes."""
    at: float
    """Time in seconds at which the item entered the queue. For an item in flight: time at which the item
    is due."""


class LinkPipe(Generic[T]):
    """Queue that delays items like one direction of a link with the properties `shape`.

    Each item has a payload size, which should not be larger than `piece`. `uniform` returns random
    numbers in [0, 1). Times are seconds of a monotonic clock.
    """

    def __init__(
        self, shape: Shape, uniform: Callable[[], float], count: Callable[[int], None] | None = None
    ) -> None:
        """`count`: called with the number of bytes on the wire of each item that passes the bucket; None
        to count nothing."""
        self._shape = shape
        self._uniform = uniform
        self._count = count
        self._backlog = Backlog()
        self._passed = 0
        """Total bytes on the wire that have passed the bucket."""
        self._waiting: deque[_QueuedItem[T]] = deque()
        self._queued = 0
        """Number of bytes that the items in the queue take on the wire."""
        self._held = 0
        """Number of payload bytes in the pipe, bytes in flight included."""
        self._under_way: deque[_QueuedItem[T]] = deque()
        self._empty_at = float("-inf")
        """Reference time of the bucket in seconds. At time t, the bucket holds (t − `_empty_at`) · rate
        / 8 bytes, but at most as many as the depth of the bucket."""
        self._open = True
        self._opened = float("-inf")
        self._last = float("-inf")
        """Due time in seconds of the item that passed the bucket last."""

    @property
    def rate(self) -> int | None:
        """Rate in bit/s; None if unlimited."""
        return self._shape.rate

    @property
    def piece(self) -> int:
        """Maximum payload of an item, in bytes. A full token bucket has enough tokens for an item of
        this size."""
        return largest_piece(self._shape.rate)

    @property
    def is_full(self) -> bool:
        """Whether the sender has to wait until the pipe has room or an outage ends."""
        if not self._open:
            return True
        rate = self._shape.rate
        queue_full = rate is not None and self._queued >= max(
            _MIN_QUEUE_BYTES, rate / 8 * _QUEUE_SECONDS
        )
        return queue_full or self._held >= _MAX_BYTES

    @property
    def use(self) -> QueueUse:
        """Use of the queue so far, which is the traffic that passed while items were waiting."""
        return self._backlog.use

    def put(self, item: T, size: int, now: float) -> None:
        """Add an item of `size` bytes of payload. An item of size 0, such as a stream's end, takes
        no bytes on the wire, but keeps its place in the order and has the link's delay."""
        self._waiting.append(_QueuedItem(item, size, now))
        self._queued += on_wire(size)
        self._held += size

    def pop_due(self, now: float) -> list[T]:
        """Remove and return the items that are due by `now`, in order."""
        self._advance(now)
        found = []
        while self._open and self._under_way and self._under_way[0].at <= now:
            item, size, _ = self._under_way.popleft()
            self._held -= size
            found.append(item)
        return found

    def next_due(self) -> float | None:
        """Return the time of the next event; None if there is none. An event happens when an item is
        due, or when an item passes the bucket and so makes room in the queue."""
        if not self._open:
            return None
        times = [self._under_way[0].at] if self._under_way else []
        if self._waiting:
            times.append(self._pass_time(self._waiting[0]))
        return max(min(times), self._opened) if times else None

    def change(self, shape: Shape, now: float) -> None:
        """Change the shape. Waiting items use the new rate. Items in flight are due at the same time as
        before."""
        self._advance(now)
        if shape.rate is not None:
            depth = float(burst(shape.rate))
            if self._shape.rate is not None:
                depth = min(
                    depth, burst(self._shape.rate), (now - self._empty_at) * self._shape.rate / 8
                )
            self._empty_at = now - 8 * depth / shape.rate
        self._shape = shape
        self._count_passed(now)

    def cut(self, now: float) -> None:
        """Start an outage. Nothing passes, and items stay in the pipe."""
        self._advance(now)
        self._backlog.pause()
        self._open = False

    def mend(self, now: float) -> None:
        """End an outage. Items that became due during the outage come out at once, as if they were
        retransmitted."""
        if not self._open:
            self._open, self._opened = True, now

    def _pass_time(self, first: _QueuedItem[T]) -> float:
        """Return the time at which the first item of the queue passes the bucket."""
        earliest = max(first.at, self._opened)
        if self._shape.rate is None:
            return earliest
        return max(earliest, self._empty_at + 8 * on_wire(first.size) / self._shape.rate)

    def _advance(self, now: float) -> None:
        while self._open and self._waiting and (passes := self._pass_time(self._waiting[0])) <= now:
            item, size, _ = self._waiting.popleft()
            wire = on_wire(size)
            self._queued -= wire
            self._passed += wire
            if self._count is not None:
                self._count(wire)
            if (rate := self._shape.rate) is not None:
                # The bucket saves up at most its depth, or one item that is larger after a slowdown.
                depth = max(burst(rate), wire)
                self._empty_at = max(self._empty_at, passes - 8 * depth / rate) + 8 * wire / rate
            self._last = max(passes + self._delay(), self._last)
            self._under_way.append(_QueuedItem(item, size, self._last))
        if self._open:
            self._count_passed(now)

    def _count_passed(self, now: float) -> None:
        """Count the bytes that have passed. Nothing leaves the queue between two calls of `_advance`, so
        an item that is waiting after one call waits until the next call."""
        self._backlog.read(now, self._passed, math.inf if self._waiting else 0, self._shape.rate)

    def _delay(self) -> float:
        if not self._shape.jitter:
            return self._shape.delay
        return max(0.0, self._shape.delay + self._shape.jitter * (2 * self._uniform() - 1))
