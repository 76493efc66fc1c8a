"""The connections of the relay's devices: their sockets, the shaped pipe for each direction, and
counters of the traffic."""

from __future__ import annotations

import asyncio
import math
import mmap
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from agents.config import AccessLink, Way
from agents.device.link import burst, queue_bytes
from agents.device.link_measurement import Backlog
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


# One direction of a shaped link, without I/O and clock: the time is an argument.
#
# As in the kernel, each item first waits in a queue for a token bucket, which counts bytes on the wire.
# Then it is in flight for the link's delay. Items keep their order, and none is lost.

T = TypeVar("T")

SEGMENT = 1448
"""Payload bytes of a full packet."""
_HEADERS = 66
"""Bytes that Ethernet, IP and TCP add to each packet."""
_PACKET = SEGMENT + _HEADERS
MAX_PIECE_BYTES = 64 * 1024
"""Maximum payload of an item, even on the fastest link."""
_MAX_BYTES = 64 * 2**20
"""Maximum payload bytes in the pipe, in flight included, even without a rate."""


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
    """Queue that delays items like one direction of a link, but loses none.

    Payloads should not be larger than `piece`. Times are seconds of a monotonic clock.
    """

    def __init__(
        self,
        link: AccessLink,
        way: Way,
        uniform: Callable[[], float],
        count: Callable[[int], None] | None = None,
    ) -> None:
        """`uniform` returns random numbers in [0, 1). `count`: called with the bytes on the wire of each
        item that passes the bucket."""
        self._link, self._way = link, way
        self.rate = link.rate(way)
        """Rate on the wire, headers included, in bit/s; None if unlimited."""
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
    def piece(self) -> int:
        """Maximum payload bytes of an item: a full bucket has enough tokens for it."""
        return largest_piece(self.rate)

    @property
    def is_full(self) -> bool:
        """True while the pipe has no room, or during an outage."""
        if not self._open:
            return True
        queue_full = self.rate is not None and self._queued >= queue_bytes(self.rate)
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

    def change(self, link: AccessLink, now: float) -> None:
        """Waiting items use the new rate; items in flight are due as before."""
        self._advance(now)
        if (rate := link.rate(self._way)) is not None:
            depth = float(burst(rate))
            if self.rate is not None:
                depth = min(depth, burst(self.rate), (now - self._empty_at) * self.rate / 8)
            self._empty_at = now - 8 * depth / rate
        self._link, self.rate = link, rate
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
        if self.rate is None:
            return earliest
        return max(earliest, self._empty_at + 8 * on_wire(first.size) / self.rate)

    def _advance(self, now: float) -> None:
        while self._open and self._waiting and (passes := self._pass_time(self._waiting[0])) <= now:
            item, size, _ = self._waiting.popleft()
            wire = on_wire(size)
            self._queued -= wire
            self._passed += wire
            if self._count is not None:
                self._count(wire)
            if (rate := self.rate) is not None:
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
        self._backlog.read(now, self._passed, math.inf if self._waiting else 0, self.rate)

    def _delay(self) -> float:
        if not self._link.jitter:
            return self._link.rtt / 2
        return max(0.0, self._link.rtt / 2 + self._link.jitter * (2 * self._uniform() - 1))


# Connections of each device; each direction of a connection goes through the pipes of its route.
#
# The relay has one thread and uses only loopback. It reads only a little more than a pipe has room for,
# so its memory is bounded, and the sender is slowed down to the link's rate.

_MAX_BACKLOG_BYTES = 256 * 1024
"""Maximum bytes in this process for a receiver that does not read, beside the kernel's buffers."""
_MIN_BUFFER_BYTES, _MAX_BUFFER_BYTES = 16 * 1024, 128 * 1024
"""Bounds of the kernel's receive buffers, which hold one second of traffic. The sender counts bytes in
them as delivered: with larger ones, a slow transfer would seem to make no progress."""
_READ_AHEAD_BYTES = 4 * 1024
"""Read limit of asyncio: above twice this number of bytes in asyncio's own buffer, the relay stops
reading."""
_CONNECT_TIMEOUT_SECONDS = 1.0
Result = TypeVar("Result")


class Lane(Protocol):
    @property
    def rate(self) -> int | None: ...

    @property
    def piece(self) -> int: ...

    @property
    def is_full(self) -> bool: ...

    def put(self, item: Callable[[], None], size: int, now: float) -> None: ...

    def advance(self) -> None: ...

    async def wait_for_room(self) -> None: ...


class Deliveries(Protocol):
    def pop_due(self, now: float) -> list[Callable[[], None]]: ...

    def next_due(self) -> float | None: ...


def deliver_due(
    queue: Deliveries, timer: asyncio.TimerHandle | None, again: Callable[[], None]
) -> asyncio.TimerHandle | None:
    """Deliver what is due. `timer`: the last one. Return the timer that calls `again` for the rest."""
    if timer is not None:
        timer.cancel()
    for deliver in queue.pop_due(time.monotonic()):
        deliver()
    due = queue.next_due()
    return None if due is None else asyncio.get_running_loop().call_at(due, again)


class LinkLane(LinkPipe[Callable[[], None]]):
    """One direction of a link, shared by all its connections, in the relay's thread. Items are
    functions, called when they are due."""

    def __init__(
        self,
        link: AccessLink,
        way: Way,
        uniform: Callable[[], float],
        count: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(link, way, uniform, count)
        self._timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()

    def advance(self) -> None:
        """Deliver what is due, and plan the next time. Call this after each change of the pipe."""
        self._timer = deliver_due(self, self._timer, self.advance)
        if not self.is_full:
            self._room.set()  # wakes all waiters, in the order in which they came
            self._room.clear()

    async def wait_for_room(self) -> None:
        """The caller has to check again: another waiter may have filled the pipe first."""
        await self._room.wait()


class Relay:
    """`serve` runs in one thread; the other methods may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop(_PreciseSelector())
        self._connections: set[asyncio.Task[None]] = set()
        """Kept because asyncio holds only a weak reference to a task after the device has closed its
        end."""

    def listen(
        self,
        listener: socket.socket,
        target: tuple[str, int],
        up: Sequence[Lane],
        down: Sequence[Lane],
    ) -> None:
        """Connect those who come to `listener` with `target`. Bytes pass the lanes one after the
        other."""
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _buffer(up))

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(_accept(target, up, down, reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        server = asyncio.start_server(accept, sock=listener, limit=_READ_AHEAD_BYTES)
        asyncio.run_coroutine_threadsafe(server, self._loop)

    def submit(self, change: Callable[[], None]) -> None:
        """Call `change`, which may change lanes, in the relay's thread between two packets."""
        self._loop.call_soon_threadsafe(change)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        done.add_done_callback(lambda ended: self.submit(lambda: ended.result()))

    def report_errors(self, report: Callable[[str], None]) -> None:
        """Call `report` with a sentence for each error of a change, in the relay's thread."""

        def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if error is None or "handle" not in context:  # a connection, which may break at any time
                loop.default_exception_handler(context)
            else:
                report(f"{type(error).__name__}: {error}")

        self._loop.set_exception_handler(handle)

    def repeat(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it in the relay's thread, between two packets."""

        def again() -> None:
            call()
            self._loop.call_later(seconds, again)

        self._loop.call_soon_threadsafe(again)

    def complete(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in the relay's thread before it serves."""
        return self._loop.run_until_complete(work)

    def serve(self) -> None:
        self._loop.run_forever()


class _PreciseSelector(selectors.DefaultSelector):
    """`select` is precise to microseconds, epoll only to milliseconds."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        select.select([self.fileno()], [], [], timeout)
        return super().select(0)


async def _accept(
    target: tuple[str, int],
    up: Sequence[Lane],
    down: Sequence[Lane],
    device_reader: asyncio.StreamReader,
    device_writer: asyncio.StreamWriter,
) -> None:
    try:
        reader, writer = await _connect(target, _buffer(down))
    except OSError:
        device_writer.close()
        return
    with closing(device_writer), closing(writer):
        far, near = (one.get_extra_info("socket") for one in (writer, device_writer))
        await asyncio.gather(
            _move(device_reader, writer, up, near), _move(reader, device_writer, down, far)
        )


def _buffer(route: Sequence[Lane]) -> int:
    """Bytes of the kernel's receive buffer in front of `route`."""
    second = min((lane.rate / 8 for lane in route if lane.rate is not None), default=_MAX_BUFFER_BYTES)
    return max(_MIN_BUFFER_BYTES, min(round(second), _MAX_BUFFER_BYTES))


async def _connect(
    target: tuple[str, int], buffer: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError."""
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.settimeout(0)
        async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
            await asyncio.get_running_loop().sock_connect(sock, target)
    except OSError:
        sock.close()
        raise
    return await asyncio.open_connection(sock=sock, limit=_READ_AHEAD_BYTES)


async def _move(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    route: Sequence[Lane],
    source: socket.socket,
) -> None:
    """Return when the end of the data has been delivered."""
    writer.transport.set_write_buffer_limits(_MAX_BACKLOG_BYTES)
    ended = asyncio.Event()

    def deliver(data: bytes) -> None:
        if writer.is_closing():  # drop what is meant for a closed receiver
            ended.set()
        elif data:
            writer.write(data)
        else:
            with suppress(OSError):  # the connection was reset
                writer.write_eof()
            ended.set()

    data, buffer = b"-", _buffer(route)
    while data and not ended.is_set():
        try:
            if buffer != (buffer := _buffer(route)):  # a rate has changed
                source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            await writer.drain()
            data = await reader.read(min(lane.piece for lane in route))
        except OSError:  # for the other side, a reset ends the stream
            data = b""
        while full := next((lane for lane in route if lane.is_full), None):
            await full.wait_for_room()
        _pass(data, route, deliver)
        await asyncio.sleep(0)  # let other waiters for the same room go first
    await ended.wait()


def _pass(data: bytes, route: Sequence[Lane], deliver: Callable[[bytes], None]) -> None:
    """Empty data means that the stream has ended."""
    if route:
        first, *others = route
        first.put(partial(_pass, data, others, deliver), len(data), time.monotonic())
        first.advance()
    else:
        deliver(data)
