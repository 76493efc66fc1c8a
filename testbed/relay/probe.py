"""What a relay's link gives, measured through it before any client is there."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from agents.config import Link
from agents.device.probe import pace, round_trip_figures
from agents.messages import LinkFigures
from testbed.relay import transfer
from testbed.relay.pipe import SEGMENT, on_wire

_TRANSFERS = 2
"""Of which the faster one counts: a busy host makes them slower, and nothing makes them faster."""
_ON_WIRE = on_wire(SEGMENT) / SEGMENT
"""What is measured is payload."""
_PATIENCE = 30.0
"""Seconds, beside the link's delay, until a byte must be back."""


def measure(asked: Link, host: str, transfers: int, echoes: int) -> LinkFigures:
    """Through `asked`, by the ports that lead to both kinds of `answering`: `rtt` in seconds, `jitter`
    (standard deviation of round trips); `up` and `down` in bit/s on the wire where rates are asked.
    Raises OSError.
    """
    count, every = pace(asked, on_wire(1))
    found = round_trip_figures(asked, round_trips(host, echoes, count, every, _PATIENCE + asked.rtt))
    for name, rate in (("up", asked.up), ("down", asked.down)):
        if rate is not None:
            move = transfer.upload if name == "up" else transfer.download
            found[name] = _ON_WIRE * max(move(host, transfers, rate) for _ in range(_TRANSFERS))
    return LinkFigures(**found)


def round_trips(host: str, port: int, count: int, every: float, patience: float) -> list[float]:
    """Seconds of each of `count` single bytes to the echo and back, one sent `every` seconds. Raises
    OSError, after `patience` seconds without one."""
    with socket.create_connection((host, port), patience) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent: list[float] = []
        begin = time.monotonic()

        def send() -> None:
            with suppress(OSError):  # who waits for the answers is told too
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
    """The ports of the other end: of transfers, and of the echo."""
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
