"""One direction of a shaped link, without I/O and clock: the time is an argument.

As in the kernel, each item first waits in a queue for a token bucket, which counts bytes on the wire.
Then it is in flight for the link's delay. Items keep their order, and none is lost.
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
"""Payload bytes of a full packet."""
_HEADERS = 66
"""Bytes that Ethernet, IP and TCP add to each packet."""
_PACKET = SEGMENT + _HEADERS
_QUEUE_SECONDS = 0.2
"""Seconds of traffic at the link's rate, as in the kernel's queue (agents.device.link)."""
_MIN_QUEUE_BYTES = 12 * _PACKET
MAX_PIECE_BYTES = 64 * 1024
"""Maximum payload of an item, even on the fastest link."""
_MAX_BYTES = 64 * 2**20
"""Maximum payload bytes in the pipe, in flight included, even without a rate."""


@dataclass(frozen=True, slots=True)
class Shape:
    rate: int | None = None
    """Rate on the wire, headers included, in bit/s; None if unlimited."""
    delay: float = 0.0
    """Seconds."""
    jitter: float = 0.0
    """Seconds. The delay of each item is uniform in delay ± jitter, but never below 0."""


def largest_piece(rate: int | None) -> int:
    """Return the maximum payload bytes of an item; None stands for an unlimited rate."""
    if rate is None:
        return MAX_PIECE_BYTES
    return min(burst(rate) // _PACKET * SEGMENT, MAX_PIECE_BYTES)


def on_wire(size: int) -> int:
    """Return the bytes on the wire, with packet headers, of `size` bytes of TCP payload."""
    return size + _HEADERS * -(-size // SEGMENT)


class _QueuedItem(NamedTuple, Generic[T]):
    item: T
    size: int
    """Payload bytes."""
    at: float
    """Seconds at which the item entered the queue, or is due if it is in flight."""


class LinkPipe(Generic[T]):
    """Queue that delays items like one direction of a link.

    Payloads should not be larger than `piece`. `uniform` returns random numbers in [0, 1). Times are
    seconds of a monotonic clock.
    """

    def __init__(
        self, shape: Shape, uniform: Callable[[], float], count: Callable[[int], None] | None = None
    ) -> None:
        """`count`: called with the bytes on the wire of each item that passes the bucket."""
        self._shape = shape
        self._uniform = uniform
        self._count = count
        self._backlog = Backlog()
        self._passed = 0
        """Bytes on the wire that have passed the bucket."""
        self._waiting: deque[_QueuedItem[T]] = deque()
        self._queued = 0
        """Bytes on the wire of the items in the queue."""
        self._held = 0
        """Payload bytes in the pipe, in flight included."""
        self._under_way: deque[_QueuedItem[T]] = deque()
        self._empty_at = float("-inf")
        """At time t, the bucket holds (t − `_empty_at`) · rate / 8 bytes, but at most its depth."""
        self._open = True
        self._opened = float("-inf")
        self._last = float("-inf")
        """Due time of the item that passed the bucket last."""

    @property
    def rate(self) -> int | None:
        """bit/s; None if unlimited."""
        return self._shape.rate

    @property
    def piece(self) -> int:
        """Maximum payload bytes of an item: a full bucket has enough tokens for it."""
        return largest_piece(self._shape.rate)

    @property
    def is_full(self) -> bool:
        """True while the pipe has no room, or during an outage."""
        if not self._open:
            return True
        rate = self._shape.rate
        queue_full = rate is not None and self._queued >= max(
            _MIN_QUEUE_BYTES, rate / 8 * _QUEUE_SECONDS
        )
        return queue_full or self._held >= _MAX_BYTES

    @property
    def use(self) -> QueueUse:
        return self._backlog.use

    def put(self, item: T, size: int, now: float) -> None:
        """An item of size 0, such as a stream's end, takes no bytes on the wire, but keeps its place and
        has the link's delay."""
        self._waiting.append(_QueuedItem(item, size, now))
        self._queued += on_wire(size)
        self._held += size

    def pop_due(self, now: float) -> list[T]:
        self._advance(now)
        found = []
        while self._open and self._under_way and self._under_way[0].at <= now:
            item, size, _ = self._under_way.popleft()
            self._held -= size
            found.append(item)
        return found

    def next_due(self) -> float | None:
        """Time at which an item is due, or passes the bucket and so makes room; None if there is
        none."""
        if not self._open:
            return None
        times = [self._under_way[0].at] if self._under_way else []
        if self._waiting:
            times.append(self._pass_time(self._waiting[0]))
        return max(min(times), self._opened) if times else None

    def change(self, shape: Shape, now: float) -> None:
        """Waiting items use the new rate; items in flight are due as before."""
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
        """Nothing passes, and items stay in the pipe."""
        self._advance(now)
        self._backlog.pause()
        self._open = False

    def mend(self, now: float) -> None:
        """Items that became due during the outage come out at once, as if retransmitted."""
        if not self._open:
            self._open, self._opened = True, now

    def _pass_time(self, first: _QueuedItem[T]) -> float:
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
        """Nothing leaves the queue between two calls of `_advance`, so an item that waits after one
        waits until the next."""
        self._backlog.read(now, self._passed, math.inf if self._waiting else 0, self._shape.rate)

    def _delay(self) -> float:
        if not self._shape.jitter:
            return self._shape.delay
        return max(0.0, self._shape.delay + self._shape.jitter * (2 * self._uniform() - 1))
