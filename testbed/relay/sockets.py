"""Connections of each device; each direction of a connection goes through the pipes of its route.

The relay has one thread and uses only loopback. It reads only a little more than a pipe has room for, so
its memory is bounded, and the sender is slowed down to the link's rate.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from testbed.relay.pipe import LinkPipe, Shape

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


class LinkLane(LinkPipe[Callable[[], None]]):
    """One direction of a link, shared by all its connections, in the relay's thread. Items are
    functions, called when they are due."""

    def __init__(
        self, shape: Shape, uniform: Callable[[], float], count: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(shape, uniform, count)
        self._timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()

    def advance(self) -> None:
        """Deliver what is due, and plan the next time. Call this after each change of the pipe."""
        if self._timer is not None:
            self._timer.cancel()
        for deliver in self.pop_due(time.monotonic()):
            deliver()
        due = self.next_due()
        loop = asyncio.get_running_loop()
        self._timer = None if due is None else loop.call_at(due, self.advance)
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
