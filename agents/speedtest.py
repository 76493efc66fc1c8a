"""How fast a device's link really is: some bytes through it, each way, timed where they arrive.

One connection per direction. The device sends a line, `up SIZE` or `down SIZE`; then the bytes go that
way, and for `up` the receiver's measure comes back as a line of JSON. What is measured is TCP payload
between the first and the last arrival, so that neither delay nor handshake counts.
"""

from __future__ import annotations

import json
import socket
import socketserver
import struct
import threading
import time
from contextlib import closing
from fcntl import ioctl

PORT = 1884
_CHUNK = 1 << 16
_LONGEST = 30.0
"""Seconds."""
_SECONDS = 1.0
"""Of transfer at the asked rate."""
_LEAST, _MOST = 12_000, 4_000_000
"""Bytes: enough packets to tell a rate, and no more than a start-up bears."""
_SIOCGIFADDR = 0x8915


def size(rate: int) -> int:
    """Bytes to measure a link of `rate` bit/s with."""
    return min(max(_LEAST, int(rate / 8 * _SECONDS)), _MOST)


def upload(host: str, rate: int) -> float:
    """bit/s of payload from here to the server. Raises OSError."""
    with _connected(host, f"up {size(rate)}") as sock:
        sock.sendall(bytes(size(rate)))
        answer = sock.makefile("rb").readline()
    return _rate(*json.loads(answer))


def download(host: str, rate: int) -> float:
    """bit/s of payload from the server to here. Raises OSError."""
    with _connected(host, f"down {size(rate)}") as sock:
        return _rate(*_drain(sock, size(rate)))


def round_trip(host: str, port: int) -> float:
    """Seconds that a connection to `host` takes: one round trip. Raises OSError."""
    begin = time.monotonic()
    with closing(socket.create_connection((host, port), _LONGEST)):
        return time.monotonic() - begin


def listen(interface: str) -> None:
    """Answer the devices on `interface`, in threads of their own, as long as this process lives."""
    server = _Server((_address_of(interface), PORT), _Handler)
    threading.Thread(target=server.serve_forever, name="speedtest", daemon=True).start()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


class _Handler(socketserver.StreamRequestHandler):
    rbufsize = 0  # what follows the line is to be timed, not read ahead
    timeout = _LONGEST

    def handle(self) -> None:
        request = self.rfile.readline(64)
        if not request:  # it wanted to know how long connecting takes
            return
        direction, count = request.split()
        wanted = min(int(count), _MOST)
        if direction == b"down":
            self.request.sendall(bytes(wanted))
        else:
            self.wfile.write(json.dumps(_drain(self.request, wanted)).encode() + b"\n")


def _connected(host: str, request: str) -> socket.socket:
    sock = socket.create_connection((host, PORT), _LONGEST)
    sock.sendall(request.encode() + b"\n")
    return sock


def _drain(sock: socket.socket, count: int) -> tuple[int, float]:
    """Bytes after the first arrival, and the seconds that they took to arrive."""
    first = received = len(sock.recv(_CHUNK))
    begin = end = time.monotonic()
    while received < count and (chunk := len(sock.recv(_CHUNK))):
        received += chunk
        end = time.monotonic()
    return received - first, end - begin


def _rate(count: int, seconds: float) -> float:
    return 8 * count / seconds if seconds > 0 else float("inf")


def _address_of(interface: str) -> str:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24])
