"""Measurement of a relay's link, before any client uses it."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from agents.config import Link
from agents.device.probe import pace, round_trip_figures
from agents.messages import LinkFigures
from testbed.relay import transfer
from testbed.relay.pipe import SEGMENT, on_wire

_TRANSFERS = 2
"""The faster one counts: a busy host makes them slower, and nothing makes them faster."""
_ON_WIRE = on_wire(SEGMENT) / SEGMENT
"""Bytes on the wire per byte of payload, which is what is measured."""
_ECHO_TIMEOUT_SECONDS = 30.0
"""Until a byte must be back, beside the link's delay."""


def measure(requested: Link, host: str, transfers: int, echoes: int) -> LinkFigures:
    """Measure a link, requested as `requested`, through its ports to both servers of `answering`: `rtt`
    in seconds, `jitter` (standard deviation of round trips); `up` and `down` in bit/s on the wire where
    rates are requested. Raises OSError.
    """
    count, every = pace(requested, on_wire(1))
    echoed = round_trips(host, echoes, count, every, _ECHO_TIMEOUT_SECONDS + requested.rtt)
    found: dict[str, Any] = round_trip_figures(requested, echoed)
    for name, rate in (("up", requested.up), ("down", requested.down)):
        if rate is not None:
            move = transfer.upload if name == "up" else transfer.download
            found[name] = _ON_WIRE * max(move(host, transfers, rate) for _ in range(_TRANSFERS))
    return LinkFigures(**found)


def round_trips(host: str, port: int, count: int, every: float, timeout: float) -> list[float]:
    """Seconds of each of `count` single bytes to the echo and back, one sent `every` seconds. Raises
    OSError, after `timeout` seconds without one."""
    with socket.create_connection((host, port), timeout) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent: list[float] = []
        begin = time.monotonic()

        def send() -> None:
            with suppress(OSError):  # the receiver below meets the error too
                for number in range(count):
                    time.sleep(max(0.0, begin + number * every - time.monotonic()))
                    sent.append(time.monotonic())
                    sock.sendall(b"!")

        threading.Thread(target=send, daemon=True).start()
        found: list[float] = []
        while len(found) < count:
            came = len(sock.recv(count))
            if not came:
                raise ConnectionError("the link has gone")
            found += [time.monotonic() - sent[len(found) + number] for number in range(came)]
        return found


@contextmanager
def answering(host: str) -> Iterator[tuple[int, int]]:
    """Run the servers at the other end, in threads; yields the ports of transfers and of the echo."""
    servers = (transfer.listen(host), _Echo((host, 0), _EchoHandler))
    threading.Thread(target=servers[1].serve_forever, daemon=True).start()
    try:
        transfers, echoes = (int(server.server_address[1]) for server in servers)
        yield transfers, echoes
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


class _Echo(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128


class _EchoHandler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with suppress(OSError):
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := self.request.recv(64):
                self.request.sendall(data)
