"""TCP throughput of a link, measured by timing some bytes where they arrive.

One connection per direction. The device's side sends a line, `up SIZE` or `down SIZE`; then the bytes go
that way, and for `up` the receiver's measure comes back as a line of JSON. What is measured is payload
between the first and the last arrival, so that neither delay nor handshake counts.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from contextlib import suppress

_CHUNK = 1 << 16
_SILENCE_TIMEOUT_SECONDS = 30.0
_TRANSFER_SECONDS = 1.0
"""Duration of a transfer at the requested rate."""
_MIN_BYTES, _MAX_BYTES = 12_000, 4_000_000
"""Enough packets to measure a rate, and no more than start-up has time for."""


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


class Server(socketserver.ThreadingTCPServer):
    """The other end, once `serve_forever` runs."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _Handler)


def listen(address: str, port: int = 0) -> Server:
    """Answer at `address`, in threads of this process, until `shutdown`; port 0: any."""
    server = Server((address, port))
    threading.Thread(target=server.serve_forever, name="transfers", daemon=True).start()
    return server


class _Handler(socketserver.StreamRequestHandler):
    rbufsize = 0  # what follows the line is to be timed, not read ahead
    timeout = _SILENCE_TIMEOUT_SECONDS

    def handle(self) -> None:
        with suppress(OSError, ValueError):  # the device has given up
            direction, count = self.rfile.readline(64).split()
            if direction == b"down":
                self.request.sendall(bytes(min(int(count), _MAX_BYTES)))
            else:
                measured = _drain(self.request, min(int(count), _MAX_BYTES))
                self.wfile.write(json.dumps(measured).encode() + b"\n")


def _connected(host: str, port: int, request: str) -> socket.socket:
    sock = socket.create_connection((host, port), _SILENCE_TIMEOUT_SECONDS)
    sock.sendall(request.encode() + b"\n")
    return sock


def _drain(sock: socket.socket, count: int) -> tuple[int, float]:
    """Bytes after the first arrival, and the seconds that they took to arrive. Raises ConnectionError
    where there are fewer than `count`."""
    first = received = len(sock.recv(_CHUNK))
    begin = end = time.monotonic()
    while received < count:
        if not (chunk := len(sock.recv(_CHUNK))):
            raise ConnectionError("the link has gone")
        received += chunk
        end = time.monotonic()
    return received - first, end - begin


def _rate(count: int, seconds: float) -> float:
    return 8 * count / seconds if seconds > 0 else float("inf")
