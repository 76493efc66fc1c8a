"""Process that makes the background traffic of a router's segments: real packets through the segments'
classes.

    python -m agents.router.background SOURCES

The router starts it as a child, so it runs in the router's network namespace, on the infrastructure's
cores. `SOURCES` is a JSON list of `RoutedTraffic`. Each line on standard input is a JSON object
`TrafficStates`; the process ends when standard input closes.

Traffic of a given rate is sent on the IFB itself, where the kernel drops it behind the classes.
Transfers (`flows`) are TCP connections from an address of their own to `SINK`, over the loopback
interface, whose packets from these addresses are redirected to the IFB. The router counts what has
passed the classes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from agents.config import Background, Way
from agents.device.link_measurement import PACKET
from agents.links import background
from agents.links.background import RateSchedule, TransferSchedule, schedule
from agents.router.segments import INTERFACES, frame, packet_socket

SINK = ("198.18.255.253", 9)
"""Address and port at which transfers end."""
_PIECE = bytes(64 * 1024)
_MAX_OPEN = 512
"""Maximum number of open transfers of a source; further ones wait."""


class RoutedTraffic(msgspec.Struct, frozen=True):
    """One kind of background traffic on one segment."""

    segment: str
    traffic: Background
    seed: int
    """Seed of the run."""
    addresses: Sequence[str]
    """Leaves of the traffic: one, or for `flows` one for each open transfer."""
    dilation: float = 1.0
    """Host seconds per second of device time."""


class TrafficStates(msgspec.Struct, frozen=True):
    """Start of the sources, and which are switched off or cut."""

    epoch: float | None = None
    """Monotonic time at which the traffic begins; None before the start."""
    off: Sequence[int] = ()
    """Sources whose transfers end."""
    cut: Sequence[int] = ()
    """Sources whose transfers wait."""


class TrafficGenerator:
    """Sends the traffic of all sources in one thread."""

    def __init__(self, sources: Sequence[RoutedTraffic]) -> None:
        self.selector = selectors.DefaultSelector()
        self._states = TrafficStates()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._sockets = {way: packet_socket(dev) for way, dev in INTERFACES.items()}
        self._traffic = sources
        self._sources = [
            Transfers(self, one) if background.is_flows(one.traffic) else Stream(self, one)
            for one in sources
        ]
        if any(isinstance(one, Transfers) for one in self._sources):
            listening = socket.create_server(SINK, backlog=1024)
            listening.settimeout(0)
            self.selector.register(listening, selectors.EVENT_READ, lambda: self._accept(listening))

    def serve(self, orders: int) -> None:
        """Send until the descriptor `orders`, with lines of `TrafficStates`, is closed."""
        os.set_blocking(orders, False)
        self.selector.register(orders, selectors.EVENT_READ, None)
        waiting = b""
        while True:
            due = self._timers[0][0] - time.monotonic() if self._timers else None
            ready = self.selector.select(None if due is None else max(0.0, due))
            for key, _ in ready:
                if key.data is not None:
                    key.data()
            # After the sockets, as an order ends transfers whose sockets are ready, too.
            if any(key.data is None for key, _ in ready):
                if not (data := os.read(orders, 65536)):
                    return
                *lines, waiting = (waiting + data).split(b"\n")
                for line in lines:
                    self._change(msgspec.json.decode(line, type=TrafficStates))
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """`when`: monotonic time."""
        heapq.heappush(self._timers, (when, next(self._numbers), call))

    def send(self, way: Way, data: bytes) -> None:
        with suppress(OSError):  # full: the kernel would have dropped the packet in the queue
            self._sockets[way].send(data)

    def _change(self, states: TrafficStates) -> None:
        is_started = self._states.epoch is not None
        self._states = states
        for number, source in enumerate(self._sources):
            source.change(is_on=number not in states.off, is_cut=number in states.cut)
        if states.epoch is None or is_started:
            return
        for one, source in zip(self._traffic, self._sources, strict=True):
            planned = schedule(
                one.traffic,
                one.seed,
                one.segment,
                epoch=states.epoch,
                dilation=one.dilation,
                now=time.monotonic(),
            )
            self._work(source, planned)

    def _work(self, source: Stream | Transfers, planned: RateSchedule | TransferSchedule) -> None:
        """Send what is due, and plan the next time."""
        for size in planned.take(time.monotonic()):
            source.send(size)
        if planned.next < math.inf:
            self.at(planned.next, partial(self._work, source, planned))

    def _accept(self, listening: socket.socket) -> None:
        with suppress(BlockingIOError):
            while True:
                connection, _ = listening.accept()
                connection.settimeout(0)
                self.selector.register(
                    connection, selectors.EVENT_READ, partial(self._receive, connection)
                )

    def _receive(self, connection: socket.socket) -> None:
        try:
            ended = not connection.recv(len(_PIECE))
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            self.selector.unregister(connection)
            connection.close()


class Stream:
    """Traffic of a given rate."""

    def __init__(self, generator: TrafficGenerator, source: RoutedTraffic) -> None:
        self._generator = generator
        self._way = source.traffic.way
        self._frame = frame("src", source.addresses[0], PACKET)
        self._is_quiet = False

    def change(self, *, is_on: bool, is_cut: bool) -> None:
        self._is_quiet = not is_on or is_cut

    def send(self, size: int) -> None:
        """Bytes on the wire, in full packets."""
        for _ in range(0 if self._is_quiet else size // PACKET):
            self._generator.send(self._way, self._frame)


class Transfers:
    """Random arrivals, each over a TCP connection of its own."""

    def __init__(self, generator: TrafficGenerator, source: RoutedTraffic) -> None:
        self._generator = generator
        self._addresses = Counter(dict.fromkeys(source.addresses, 0))
        """Open transfers from each address."""
        self._waiting: list[int] = []
        """Bytes of transfers that have arrived but not begun."""
        self._left: dict[socket.socket, int] = {}
        """Bytes that each open transfer still has to write."""
        self._is_on, self._is_cut = True, False

    def change(self, *, is_on: bool, is_cut: bool) -> None:
        was_cut, self._is_on, self._is_cut = self._is_cut, is_on, is_cut
        if not is_on:
            self._waiting.clear()
            for sock in [*self._left]:
                self._end(sock)
        elif was_cut and not is_cut:
            for sock in self._left:
                self._generator.selector.register(
                    sock, selectors.EVENT_WRITE, partial(self._write, sock)
                )
            self._begin()
        elif is_cut and not was_cut:
            for sock in self._left:
                self._generator.selector.unregister(sock)

    def send(self, size: int) -> None:
        """Begin a transfer as soon as possible."""
        if self._is_on:
            self._waiting.append(size)
            self._begin()

    def _begin(self) -> None:
        while self._waiting and not self._is_cut and len(self._left) < _MAX_OPEN:
            address = min(self._addresses, key=lambda one: self._addresses[one])
            sock = socket.socket()
            sock.settimeout(0)
            sock.bind((address, 0))
            sock.connect_ex(SINK)
            self._addresses[address] += 1
            self._left[sock] = self._waiting.pop(0)
            self._generator.selector.register(sock, selectors.EVENT_WRITE, partial(self._write, sock))

    def _write(self, sock: socket.socket) -> None:
        left = self._left[sock]
        try:
            self._left[sock] = left = left - sock.send(_PIECE[:left])
        except BlockingIOError:
            return
        except OSError:
            left = 0
        if left <= 0:
            self._end(sock)

    def _end(self, sock: socket.socket) -> None:
        if not self._is_cut:
            self._generator.selector.unregister(sock)
        with suppress(OSError):
            self._addresses[sock.getsockname()[0]] -= 1
        sock.close()
        del self._left[sock]
        self._begin()


def main() -> None:
    generator = TrafficGenerator(msgspec.json.decode(sys.argv[1], type=list[RoutedTraffic]))
    generator.serve(sys.stdin.fileno())


def command(sources: Sequence[RoutedTraffic]) -> list[str]:
    return [sys.executable, "-m", "agents.router.background", msgspec.json.encode(sources).decode()]


def line(states: TrafficStates) -> bytes:
    return msgspec.json.encode(states) + b"\n"


if __name__ == "__main__":
    main()
