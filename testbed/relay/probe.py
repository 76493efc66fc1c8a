"""What a relay's link gives, measured through it before any client is there."""

from __future__ import annotations

import socket
import socketserver
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from agents import speedtest
from agents.config import Link
from testbed.relay.pipe import on_wire

_MOST = 500
"""Round trips."""
_SECONDS = 2.0
"""For them."""
_CLOSEST = 0.002
"""Seconds between them, at least."""
_SHARE = 0.25
"""Of the link that they may take, so that none waits for another."""
_TRANSFERS = 2
"""Of which the faster one counts: a busy host makes them slower, and nothing makes them faster."""
_ON_WIRE = on_wire(1448) / 1448
"""What is measured is payload."""
_PATIENCE = 30.0
"""Seconds, beside the link's delay, until a byte must be back."""


def measure(asked: Link, host: str, transfers: int, echoes: int) -> dict[str, float]:
    """Through `asked`, by the ports that lead to both kinds of `answering`: `rtt` in seconds, `jitter`
    (standard deviation of round trips); `up` and `down` in bit/s on the wire where rates are asked.
    Raises OSError.

    The round trip is the typical one under jitter, else the shortest: what is above that is the wait of
    a busy host, not the link's.
    """
    trips = _round_trips(asked, host, echoes)
    rtt = statistics.median(trips) if asked.jitter else min(trips)
    found = {"rtt": rtt, "jitter": statistics.pstdev(trips)}
    if asked.up is not None:
        found["up"] = _ON_WIRE * max(
            speedtest.upload(host, asked.up, transfers) for _ in range(_TRANSFERS)
        )
    if asked.down is not None:
        found["down"] = _ON_WIRE * max(
            speedtest.download(host, asked.down, transfers) for _ in range(_TRANSFERS)
        )
    return found


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
    servers = (speedtest.listen(host, 0), _Echo((host, 0), _EchoHandler))
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


def _round_trips(asked: Link, host: str, port: int) -> list[float]:
    """So far apart that none waits for another: for the link, or, as order is kept, for its jitter."""
    slowest = min(rate for rate in (asked.up, asked.down, 10**12) if rate is not None)
    every = max(_CLOSEST, 8 * on_wire(1) / slowest / _SHARE, 2 * asked.jitter)
    count = min(_MOST, max(5, int(_SECONDS / every)))
    return round_trips(host, port, count, every, _PATIENCE + asked.rtt)
