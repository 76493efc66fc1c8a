"""One direction of a shaped link: bytes go in, and come out when they are due. Pure: time is an
argument.

As in the kernel, a token bucket on the bytes on the wire comes first, behind a queue; what has passed it
is under way for the link's delay. The order is kept, and nothing is lost.
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
"""Bytes of payload in a full packet."""
_HEADERS = 66
"""Bytes that Ethernet, IP and TCP add to each."""
_PACKET = SEGMENT + _HEADERS
_QUEUE_SECONDS = 0.2
"""Length of the queue at the link's rate, as in the kernel's queue (agents.device.link)."""
_MIN_QUEUE_BYTES = 12 * _PACKET
_MAX_PIECE_BYTES = 64 * 1024
"""Of one piece, however fast the link."""
_MAX_BYTES = 64 * 2**20
"""What may be in the pipe, under way included, where no rate sets a bound."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties of one direction of a link."""

    rate: int | None = None
    """bit/s on the wire, headers included."""
    delay: float = 0.0
    """Seconds."""
    jitter: float = 0.0
    """Seconds: each piece's delay is uniform in delay ± jitter, and never negative."""


def on_wire(size: int) -> int:
    """Bytes that `size` bytes of TCP payload are on the wire: in full packets, each with its headers."""
    return size + _HEADERS * -(-size // SEGMENT)


class _Entry(NamedTuple, Generic[T]):
    item: T
    size: int
    """Bytes of payload."""
    at: float
    """When it arrived in the queue, or is due where it is under way."""


class Pipe(Generic[T]):
    """Items of some payload each, in order. `uniform` gives random numbers in [0, 1).

    Times are seconds of a clock that never goes back. Items should not be larger than `piece`.
    """

    def __init__(
        self, shape: Shape, uniform: Callable[[], float], count: Callable[[int], None] | None = None
    ) -> None:
        """`count` is called with the bytes on the wire of each item that passes the bucket."""
        self._shape = shape
        self._uniform = uniform
        self._count = count
        self._backlog = Backlog()
        self._passed = 0
        """Bytes on the wire that have passed the bucket."""
        self._waiting: deque[_Entry[T]] = deque()
        self._queued = 0
        """Bytes on the wire in the queue."""
        self._held = 0
        """Bytes of payload of all that is in the pipe."""
        self._under_way: deque[_Entry[T]] = deque()
        self._empty_at = float("-inf")
        """When the bucket would have been empty, had it filled ever since."""
        self._open = True
        self._opened = float("-inf")
        self._last = float("-inf")
        """When what last passed the bucket is due."""

    @property
    def rate(self) -> int | None:
        """bit/s; None: unlimited."""
        return self._shape.rate

    @property
    def piece(self) -> int:
        """Bytes of payload to hand over at a time: what the bucket lets pass at once."""
        if self._shape.rate is None:
            return _MAX_PIECE_BYTES
        return min(burst(self._shape.rate) // _PACKET * SEGMENT, _MAX_PIECE_BYTES)

    @property
    def full(self) -> bool:
        """Whether the sender has to wait: for room, or for an outage to end."""
        if not self._open:
            return True
        rate = self._shape.rate
        queue_full = rate is not None and self._queued >= max(
            _MIN_QUEUE_BYTES, rate / 8 * _QUEUE_SECONDS
        )
        return queue_full or self._held >= _MAX_BYTES

    @property
    def use(self) -> QueueUse:
        """Traffic that passed while something waited."""
        return self._backlog.use

    def put(self, item: T, size: int, now: float) -> None:
        """`size` bytes of payload arrive; 0 for what takes no time, as the end of a stream."""
        self._waiting.append(_Entry(item, size, now))
        self._queued += on_wire(size)
        self._held += size

    def take(self, now: float) -> list[T]:
        """Remove and return the items that have come out by `now`, in order."""
        self._advance(now)
        found = []
        while self._open and self._under_way and self._under_way[0].at <= now:
            item, size, _ = self._under_way.popleft()
            self._held -= size
            found.append(item)
        return found

    def next_due(self) -> float | None:
        """When there is something to do: an item comes out, or passes the bucket and makes room. None
        while nothing will."""
        if not self._open:
            return None
        times = [self._under_way[0].at] if self._under_way else []
        if self._waiting:
            times.append(self._passes(self._waiting[0]))
        return max(min(times), self._opened) if times else None

    def change(self, shape: Shape, now: float) -> None:
        """What waits goes on at the new rate; what is under way is due as before."""
        self._advance(now)
        if shape.rate is not None:
            depth = float(burst(shape.rate))
            if self._shape.rate is not None:
                depth = min(
                    depth, burst(self._shape.rate), (now - self._empty_at) * self._shape.rate / 8
                )
            self._empty_at = now - 8 * depth / shape.rate
        self._shape = shape
        self._look(now)

    def cut(self, now: float) -> None:
        """Let nothing pass any more; what is in the pipe stays there."""
        self._advance(now)
        self._backlog.pause()
        self._open = False

    def mend(self, now: float) -> None:
        """Let traffic pass again; what fell due meanwhile comes out at once, as a retransmission
        would."""
        if not self._open:
            self._open, self._opened = True, now

    def _passes(self, first: _Entry[T]) -> float:
        """When the first item of the queue passes the bucket."""
        earliest = max(first.at, self._opened)
        if self._shape.rate is None:
            return earliest
        return max(earliest, self._empty_at + 8 * on_wire(first.size) / self._shape.rate)

    def _advance(self, now: float) -> None:
        while self._open and self._waiting and (passes := self._passes(self._waiting[0])) <= now:
            item, size, _ = self._waiting.popleft()
            wire = on_wire(size)
            self._queued -= wire
            self._passed += wire
            if self._count is not None:
                self._count(wire)
            if (rate := self._shape.rate) is not None:
                # No more than a bucket is saved up; a piece that a slower rate found here may be larger.
                depth = max(burst(rate), wire)
                self._empty_at = max(self._empty_at, passes - 8 * depth / rate) + 8 * wire / rate
            self._last = max(passes + self._delay(), self._last)
            self._under_way.append(_Entry(item, size, self._last))
        if self._open:
            self._look(now)

    def _look(self, now: float) -> None:
        """Count what has passed. Nothing leaves the queue between two calls of `_advance`, so what waits
        after one waits until the next."""
        self._backlog.read(now, self._passed, math.inf if self._waiting else 0, self._shape.rate)

    def _delay(self) -> float:
        if not self._shape.jitter:
            return self._shape.delay
        return max(0.0, self._shape.delay + self._shape.jitter * (2 * self._uniform() - 1))
