"""Measurement of a relay's link, before any client uses it.

The device's side opens a connection and sends a line that says what for:

- `echo`: a byte comes, then every byte that is sent comes back;
- `down SIZE`: so many bytes come;
- `up SIZE`: so many bytes follow, and the receiver's measure comes back as a line of JSON.

A rate is that of payload between its first and its last arrival: neither delay nor handshake counts.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from agents.config import AccessLink
from agents.device.link_probe import fastest, pace, round_trip_figures
from agents.wire.messages import LinkFigures
from testbed.relay.pipe import SEGMENT, on_wire

_TRANSFER_SECONDS = 1.0
"""Duration of a transfer at the requested rate."""
_MIN_BYTES, _MAX_BYTES = 12_000, 4_000_000
"""Enough packets to measure a rate, and no more than start-up has time for."""
_CHUNK_BYTES = 1 << 16
_ON_WIRE = on_wire(SEGMENT) / SEGMENT
"""Bytes on the wire per byte of payload, which is what is measured."""
_SILENCE_TIMEOUT_SECONDS = 30.0
"""Until the next byte must come, beside the link's delay."""


def measure(requested: AccessLink, host: str, port: int) -> LinkFigures:
    """Measure a link, requested as `requested`, through its `port` to the server of `answering`: `rtt`
    in seconds, `jitter` (standard deviation of round trips); `up` and `down` in bit/s on the wire where
    rates are requested. Raises OSError.
    """
    count, interval = pace(requested, on_wire(1))
    trips = round_trips(host, port, count, interval, _SILENCE_TIMEOUT_SECONDS + requested.rtt)
    found: dict[str, Any] = round_trip_figures(requested, trips)
    for name, rate, transfer in (("up", requested.up, upload), ("down", requested.down, download)):
        if rate is not None:
            payload = partial(transfer, host, port, rate)
            found[name] = _ON_WIRE * fastest(payload, rate / _ON_WIRE)
    return LinkFigures(**found)


def round_trips(host: str, port: int, count: int, interval: float, timeout: float) -> list[float]:
    """Seconds of each of `count` single bytes to the server and back, one sent every `interval` seconds.
    Raises OSError, after `timeout` seconds without one."""
    with _connected(host, port, "echo", timeout) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _receive(sock, 1)
        sent: list[float] = []
        begin = time.monotonic()

        def send() -> None:
            with suppress(OSError):  # the receiver below meets the error too
                for number in range(count):
                    time.sleep(max(0.0, begin + number * interval - time.monotonic()))
                    sent.append(time.monotonic())
                    sock.sendall(b"!")

        threading.Thread(target=send, daemon=True).start()
        found: list[float] = []
        while len(found) < count:
            arrived = _receive(sock, count)
            found += [time.monotonic() - sent[len(found) + number] for number in range(arrived)]
        return found


def size(rate: int) -> int:
    """Bytes to measure a link of `rate` bit/s with."""
    return min(max(_MIN_BYTES, int(rate / 8 * _TRANSFER_SECONDS)), _MAX_BYTES)


def upload(host: str, port: int, rate: int) -> float:
    """bit/s of payload from here to the server. Raises OSError."""
    with _connected(host, port, f"up {size(rate)}") as sock:
        sock.sendall(bytes(size(rate)))
        answer = sock.makefile("rb").readline()
    if not answer:
        raise ConnectionError("the link has gone")
    return _rate(*json.loads(answer))


def download(host: str, port: int, rate: int) -> float:
    """bit/s of payload from the server to here. Raises OSError."""
    with _connected(host, port, f"down {size(rate)}") as sock:
        return _rate(*_drain(sock, size(rate)))


def listen(host: str, port: int = 0) -> socketserver.TCPServer:
    """The server at the other end, running in threads until `shutdown`; port 0: any."""
    server = _Server((host, port), _ProbeHandler)
    threading.Thread(target=server.serve_forever, name="probes", daemon=True).start()
    return server


@contextmanager
def answering(host: str) -> Iterator[int]:
    """Run the server meanwhile; yields its port."""
    with listen(host) as server:
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128


class _ProbeHandler(socketserver.StreamRequestHandler):
    rbufsize = 0  # what follows the line is to be timed, not read ahead
    disable_nagle_algorithm = True
    timeout = _SILENCE_TIMEOUT_SECONDS

    def handle(self) -> None:
        with suppress(OSError, ValueError):  # the device has given up
            match self.rfile.readline(64).split():
                case [b"echo"]:
                    data = b"!"
                    while data:
                        self.request.sendall(data)
                        data = self.request.recv(64)
                case [b"down", count]:
                    self.request.sendall(bytes(min(int(count), _MAX_BYTES)))
                case [b"up", count]:
                    measured = _drain(self.request, min(int(count), _MAX_BYTES))
                    self.wfile.write(json.dumps(measured).encode() + b"\n")


def _connected(
    host: str, port: int, request: str, timeout: float = _SILENCE_TIMEOUT_SECONDS
) -> socket.socket:
    sock = socket.create_connection((host, port), timeout)
    sock.sendall(f"{request}\n".encode())
    return sock


def _receive(sock: socket.socket, most: int) -> int:
    """Number of bytes that arrive next. Raises ConnectionError at the stream's end."""
    if not (count := len(sock.recv(most))):
        raise ConnectionError("the link has gone")
    return count


def _drain(sock: socket.socket, count: int) -> tuple[int, float]:
    """Bytes after the first arrival, and the seconds that they took to arrive. Raises ConnectionError
    where there are fewer than `count`."""
    first = received = _receive(sock, _CHUNK_BYTES)
    begin = end = time.monotonic()
    while received < count:
        received += _receive(sock, _CHUNK_BYTES)
        end = time.monotonic()
    return received - first, end - begin


def _rate(count: int, seconds: float) -> float:
    return 8 * count / seconds if seconds > 0 else float("inf")
