"""The relay's sockets: each device's connections, each way through the pipes of its route.

One thread, loopback only. The relay reads no further ahead than a pipe has room, so that memory is
bounded and the sender feels the rate.
"""

from __future__ import annotations

import queue
import select
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from testbed.relay.pipe import Pipe

_MAX_BACKLOG_BYTES = 256 * 1024
"""What may wait for a receiver that does not read, beyond what its kernel holds."""
_BUFFER_BYTES = 128 * 1024
"""Size of the kernel's receive buffers: what it reads ahead of the relay."""
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

_Handler = Callable[[int, float], None]
Lane = Pipe["tuple[Flow, bytes]"]
"""One direction of a link; all connections behind it share it. No bytes: the stream's end."""


class Flow:
    """One direction of a connection: from `source` through `route`, lane by lane, to `sink`."""

    def __init__(self, source: socket.socket, sink: socket.socket, route: Sequence[Lane]) -> None:
        self.source, self.sink, self.route = source, sink, route
        self.backlog = bytearray()
        """Due, and not yet taken by the sink."""
        self.ended = False
        """Nothing more comes from the source."""
        self.delivered = False
        """Nothing more goes to the sink."""
        self._last = False

    @property
    def wants(self) -> bool:
        """Whether there is room for more of the source."""
        if self.ended or len(self.backlog) > _MAX_BACKLOG_BYTES:
            return False
        return not any(lane.full for lane in self.route)

    def read(self, now: float) -> None:
        try:
            data = self.source.recv(min(lane.piece for lane in self.route))
        except BlockingIOError:
            return
        except OSError:  # reset: to the other side, an end
            data = b""
        self.ended = not data
        self.route[0].put((self, data), len(data), now)

    def after(self, lane: Lane) -> Lane | None:
        """The next of the route; None: the sink."""
        return next((b for a, b in pairwise(self.route) if a is lane), None)

    def deliver(self, data: bytes) -> None:
        self._last = not data
        self.backlog += data
        self.write()

    def write(self) -> None:
        """Write as much as the sink takes; what is for one that has closed is dropped."""
        try:
            while self.backlog and not self.delivered:
                del self.backlog[: self.sink.send(self.backlog)]
            if self._last and not self.delivered:
                self.delivered = True
                self.sink.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self.ended = self.delivered = True
        if self.delivered:
            self.backlog.clear()


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    flows: tuple[Flow, Flow]

    @property
    def over(self) -> bool:
        return all(flow.delivered for flow in self.flows)

    def events(self, sock: socket.socket) -> int:
        """What there is to wait for at `sock`."""
        return sum(
            (_READ if flow.source is sock and flow.wants else 0)
            | (_WRITE if flow.sink is sock and flow.backlog else 0)
            for flow in self.flows
        )


class Relay:
    """Moves bytes between sockets; `serve` runs in one thread, `submit` may be called from any."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._busy: set[Lane] = set()
        self._connections: dict[Lane, dict[_Connection, None]] = {}
        """Connections of each lane, the one served longest ago first."""
        self._changes: queue.SimpleQueue[Callable[[float], Iterable[Lane]]] = queue.SimpleQueue()
        self._woken, self._wake = socket.socketpair()
        self._woken.settimeout(0)
        self._selector.register(self._woken, _READ, self._apply_changes)

    def listen(
        self,
        listener: socket.socket,
        target: tuple[str, int],
        up: Sequence[Lane],
        down: Sequence[Lane],
    ) -> None:
        """Connect whoever connects to `listener` with `target`, each way through lane after lane."""
        listener.settimeout(0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._selector.register(listener, _READ, partial(self._accept, listener, target, up, down))

    def submit(self, change: Callable[[float], Iterable[Lane]]) -> None:
        """Have `change` called between two packets, with the time; it returns the lanes that it
        changed."""
        self._changes.put(change)
        self._wake.send(b"!")

    def serve(self) -> None:
        """Serve until the process ends."""
        while True:
            self._sleep()
            now = time.monotonic()
            for key, events in self._selector.select(0):
                handler: _Handler = key.data
                handler(events & key.events, now)
            self._deliver()

    def _sleep(self) -> None:
        """Sleep until a socket is ready or something falls due: by `select`, which counts in
        microseconds, on the selector's own file, as epoll counts in milliseconds."""
        dues = [due for lane in self._busy if (due := lane.next_due()) is not None]
        timeout = max(0.0, min(dues) - time.monotonic()) if dues else None
        select.select([self._selector.fileno()], [], [], timeout)

    def _deliver(self) -> None:
        for lane in list(self._busy):
            for flow, data in lane.take(now := time.monotonic()):
                if (after := flow.after(lane)) is None:
                    flow.deliver(data)
                else:
                    after.put((flow, data), len(data), now)
                    self._busy.add(after)
            if lane.next_due() is None:
                self._busy.discard(lane)
            self._refresh(lane)

    def _apply_changes(self, _events: int, now: float) -> None:
        self._woken.recv(64)
        while not self._changes.empty():
            self._busy.update(self._changes.get()(now))

    def _accept(
        self,
        listener: socket.socket,
        target: tuple[str, int],
        up: Sequence[Lane],
        down: Sequence[Lane],
        _events: int,
        _now: float,
    ) -> None:
        try:
            device, _ = listener.accept()
        except OSError:
            return
        try:
            server = _connected(target)
        except OSError:
            device.close()
            return
        for sock in (device, server):
            sock.settimeout(0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection((Flow(device, server, up), Flow(server, device, down)))
        for lane in (*up, *down):
            self._connections.setdefault(lane, {})[connection] = None
        self._refresh(up[0])

    def _ready(self, connection: _Connection, sock: socket.socket, events: int, now: float) -> None:
        for flow in connection.flows:
            if events & _READ and flow.source is sock and flow.wants:
                flow.read(now)
                self._busy.add(flow.route[0])
                self._move_last(connection, flow)
                self._refresh(flow.route[0])
            if events & _WRITE and flow.sink is sock:
                flow.write()
                self._refresh(flow.route[0])

    def _move_last(self, connection: _Connection, flow: Flow) -> None:
        """Move `connection` behind the others of `flow`'s lanes, so that they get the next room."""
        for lane in flow.route:
            self._connections[lane][connection] = self._connections[lane].pop(connection)

    def _refresh(self, lane: Lane) -> None:
        """Wait at the sockets of `lane`'s connections for what they now have room or bytes for."""
        for connection in list(self._connections.get(lane, ())):
            if connection.over:
                self._close(connection)
                continue
            for flow in connection.flows:
                handler = partial(self._ready, connection, flow.source)
                self._wait_at(flow.source, connection.events(flow.source), handler)

    def _wait_at(self, sock: socket.socket, events: int, handler: _Handler) -> None:
        known = self._selector.get_map().get(sock)
        if known is None and events:
            self._selector.register(sock, events, handler)
        elif known is not None and not events:
            self._selector.unregister(sock)
        elif known is not None and known.events != events:
            self._selector.modify(sock, events, handler)

    def _close(self, connection: _Connection) -> None:
        for flow in connection.flows:
            for lane in flow.route:
                del self._connections[lane][connection]
            self._wait_at(flow.source, 0, _nothing)
            flow.source.close()


def _connected(target: tuple[str, int]) -> socket.socket:
    """Raises OSError."""
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        sock.settimeout(1.0)
        sock.connect(target)
    except OSError:
        sock.close()
        raise
    return sock


def _nothing(_events: int, _now: float) -> None: ...
