"""How fast a device's link really is: some bytes through it, each way, timed where they arrive.

    python -m agents.speedtest COMMAND ...

answers the devices at this container's address, and becomes COMMAND, with which it ends.

One connection per direction. The device sends a line, `up SIZE` or `down SIZE`; then the bytes go that
way, and for `up` the receiver's measure comes back as a line of JSON. What is measured is TCP payload
between the first and the last arrival, so that neither delay nor handshake counts. Devices that share a
link measure in turn: `turn NAME` answers once the link NAME is theirs, until the connection ends.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from agents import packettrain

PORT = 1884
_CHUNK = 1 << 16
_LONGEST = 30.0
"""Seconds."""
_LONGEST_WAIT = 600.0
"""Seconds, for a turn."""
_SECONDS = 1.0
"""Of transfer at the asked rate."""
_LEAST, _MOST = 12_000, 4_000_000
"""Bytes: enough packets to tell a rate, and no more than a start-up bears."""


def size(rate: int) -> int:
    """Bytes to measure a link of `rate` bit/s with."""
    return min(max(_LEAST, int(rate / 8 * _SECONDS)), _MOST)


def upload(host: str, rate: int, port: int = PORT) -> float:
    """bit/s of payload from here to the server. Raises OSError."""
    with _connected(host, port, f"up {size(rate)}") as sock:
        sock.sendall(bytes(size(rate)))
        answer = sock.makefile("rb").readline()
    return _rate(*json.loads(answer))


def download(host: str, rate: int, port: int = PORT) -> float:
    """bit/s of payload from the server to here. Raises OSError."""
    with _connected(host, port, f"down {size(rate)}") as sock:
        return _rate(*_drain(sock, size(rate)))


def main() -> None:
    address = socket.gethostbyname(socket.gethostname())
    listening = Server((address, PORT))
    if os.fork() == 0:
        packettrain.listen(address)
        listening.serve_forever()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606


@contextmanager
def turn(host: str, name: str) -> Iterator[None]:
    """As long as it is this device's turn on the link `name`. Raises OSError."""
    with closing(socket.create_connection((host, PORT), _LONGEST)) as sock:
        sock.settimeout(_LONGEST_WAIT)
        sock.sendall(f"turn {name}\n".encode())
        if not sock.recv(1):
            raise ConnectionError(f"{host} has no turn for this device")
        yield


def listen(address: str, port: int = PORT) -> Server:
    """Answer devices at `address`, in threads of this process, until `shutdown`; port 0: any."""
    server = Server((address, port))
    threading.Thread(target=server.serve_forever, name="speedtest", daemon=True).start()
    return server


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _Handler)
        self.turns: defaultdict[bytes, threading.Lock] = defaultdict(threading.Lock)
        """By name of the link."""


class _Handler(socketserver.StreamRequestHandler):
    server: Server
    rbufsize = 0  # what follows the line is to be timed, not read ahead
    timeout = _LONGEST

    def handle(self) -> None:
        with suppress(OSError):  # the device has given up
            request = self.rfile.readline(64)
            if request:  # else it wanted to know whether we are there
                self._answer(*request.split())

    def _answer(self, direction: bytes, what: bytes) -> None:
        if direction == b"turn":
            with self.server.turns[what]:
                self.wfile.write(b"!")
                self.connection.settimeout(_LONGEST_WAIT)
                self.rfile.read(1)  # until the device is done
        elif direction == b"down":
            self.request.sendall(bytes(min(int(what), _MOST)))
        else:
            self.wfile.write(json.dumps(_drain(self.request, min(int(what), _MOST))).encode() + b"\n")


def _connected(host: str, port: int, request: str) -> socket.socket:
    sock = socket.create_connection((host, port), _LONGEST)
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


if __name__ == "__main__":
    main()
