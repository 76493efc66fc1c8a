"""The relay's sockets: the connections of each device. Each direction of a connection goes through the
pipes of its route.

The relay has one thread and uses only loopback. The relay reads only a little more than a pipe has room
for. The relay's memory is therefore bounded, and the sender is slowed down to the link's rate.
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
"""Maximum number of bytes that wait in this process for a receiver that does not read. Bytes in the
kernel's buffers are not counted."""
_MIN_BUFFER_BYTES, _MAX_BUFFER_BYTES = 16 * 1024, 128 * 1024
"""Minimum and maximum size of the kernel's receive buffers in bytes. Between these bounds, a buffer
holds one second of traffic at the link's rate.

The sender counts bytes in these buffers as delivered. With larger buffers, a slow transfer would seem to
make no progress.
"""
_READ_AHEAD_BYTES = 4 * 1024
"""Read limit of asyncio, in bytes. If asyncio's own buffer has more than twice this number of bytes, the
relay stops reading."""
_CONNECT_TIMEOUT_SECONDS = 1.0
Result = TypeVar("Result")


class Lane(Protocol):
    """Part of the way of a connection's bytes in one direction."""

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
    """One direction of a link, shared by all connections that use the link. Its items are functions,
    which are called when they are due.

    Used only in the relay's thread.
    """

    def __init__(
        self, shape: Shape, uniform: Callable[[], float], count: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(shape, uniform, count)
        self._timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()

    def advance(self) -> None:
        """Call the items that are due, and schedule the next one. Call this method after each change of
        the pipe."""
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
        """Wait until the pipe has room. The caller has to check again, because another waiter may have
        filled the pipe first."""
        await self._room.wait()


class Relay:
    """Transfer of bytes between sockets, through the lanes of links. `serve` runs in one thread. The
    other methods may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop(_PreciseSelector())
        self._connections: set[asyncio.Task[None]] = set()
        """Tasks of the open connections. They are stored here because asyncio holds only a weak
        reference to a task after the device has closed its end of the connection."""

    def listen(
        self,
        listener: socket.socket,
        target: tuple[str, int],
        up: Sequence[Lane],
        down: Sequence[Lane],
    ) -> None:
        """Accept connections on `listener`, and connect each of them with `target`.

        Each direction of a connection passes its lanes one after the other.
        """
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _buffer(up))

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(_accept(target, up, down, reader, writer))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        server = asyncio.start_server(accept, sock=listener, limit=_READ_AHEAD_BYTES)
        asyncio.run_coroutine_threadsafe(server, self._loop)

    def submit(self, change: Callable[[], None]) -> None:
        """Call `change` between two packets, in the relay's thread. `change` may change lanes."""
        self._loop.call_soon_threadsafe(change)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the relay's thread while it serves."""
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
        """Call `call` every `seconds` seconds, in the relay's thread. The calls take place between two
        packets."""

        def again() -> None:
            call()
            self._loop.call_later(seconds, again)

        self._loop.call_soon_threadsafe(again)

    def complete(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in the relay's thread before it serves; return its result."""
        return self._loop.run_until_complete(work)

    def serve(self) -> None:
        """Serve until the process ends."""
        self._loop.run_forever()


class _PreciseSelector(selectors.DefaultSelector):
    """Selector that waits with `select`, which is precise to microseconds. epoll is precise only to
    milliseconds."""

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
    """Serve a new connection of a device until the connection ends."""
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
    """Return the size, in bytes, of the kernel's receive buffer in front of `route`."""
    second = min((lane.rate / 8 for lane in route if lane.rate is not None), default=_MAX_BUFFER_BYTES)
    return max(_MIN_BUFFER_BYTES, min(round(second), _MAX_BUFFER_BYTES))


async def _connect(
    target: tuple[str, int], buffer: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to `target`. Raises OSError."""
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
    """Move the data of one direction of a connection from `source` through `route`. Return when the end
    of the data has been delivered."""
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
    """Pass `data` through `route`, lane by lane, then `deliver` it. Empty data means that the stream has
    ended."""
    if route:
        first, *others = route
        first.put(partial(_pass, data, others, deliver), len(data), time.monotonic())
        first.advance()
    else:
        deliver(data)
