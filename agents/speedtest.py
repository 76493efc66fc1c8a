"""How fast a device's link really is: some bytes through it, each way, timed where they arrive.

    python -m agents.speedtest COMMAND ...

answers the devices at this container's address, and becomes COMMAND, with which it ends.

One connection per direction. The device sends a line, `up SIZE` or `down SIZE`; then the bytes go that
way, and for `up` the receiver's measure comes back as a line of JSON. What is measured is TCP payload
in the fastest fifth of the transfer, by the kernel's arrival times: no stretch passes faster than the
link, and a slower one tells of TCP, which begins slowly on a long link and holds back after a loss.
Devices that share a link measure in turn: `turn NAME` answers once the link NAME is theirs, until the
connection ends.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

PORT = 1884
_CHUNK = 1 << 20
_STRETCHES = 5
_SO_TIMESTAMPNS = 35
_STAMP = struct.Struct("qq")
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


def main() -> None:
    listening = _Server((socket.gethostbyname(socket.gethostname()), PORT))
    if os.fork() == 0:
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


def listen(address: str) -> None:
    """Answer devices at `address`, in threads of this process, as long as it lives."""
    server = _Server((address, PORT))
    threading.Thread(target=server.serve_forever, name="speedtest", daemon=True).start()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _Handler)
        self.turns: defaultdict[bytes, threading.Lock] = defaultdict(threading.Lock)
        """By name of the link."""


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    rbufsize = 0  # what follows the line is to be timed, not read ahead
    timeout = _LONGEST

    def handle(self) -> None:
        request = self.rfile.readline(64)
        if not request:  # it wanted to know how long connecting takes
            return
        direction, what = request.split()
        if direction == b"turn":
            with self.server.turns[what]:
                self.wfile.write(b"!")
                self.connection.settimeout(_LONGEST_WAIT)
                self.rfile.read(1)  # until the device is done
        elif direction == b"down":
            self.request.sendall(bytes(min(int(what), _MOST)))
        else:
            self.wfile.write(json.dumps(_drain(self.request, min(int(what), _MOST))).encode() + b"\n")


def _connected(host: str, request: str) -> socket.socket:
    sock = socket.create_connection((host, PORT), _LONGEST)
    sock.sendall(request.encode() + b"\n")
    return sock


def _drain(sock: socket.socket, count: int) -> tuple[int, float]:
    """Bytes and seconds of the fastest stretch of `count` bytes that arrive."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    chunk, received = bytearray(_CHUNK), 0
    arrivals: list[tuple[int, float]] = []
    while received < count:
        size, control, _, _ = sock.recvmsg_into([chunk], 64)
        if not size:
            break
        received += size
        arrivals.append((received, _arrived(control)))
    return fastest(arrivals, max(_LEAST, count // _STRETCHES))


def _arrived(control: list[tuple[int, int, bytes]]) -> float:
    """When the kernel had the last of what was read."""
    if not control:  # stamping begins a moment after it is asked for
        return time.time()
    seconds, nanoseconds = _STAMP.unpack(control[0][2])
    return float(seconds + nanoseconds / 1e9)


def fastest(arrivals: Sequence[tuple[int, float]], least: int) -> tuple[int, float]:
    """Bytes and seconds of the fastest stretch of at least `least` bytes, else of all after the first.

    `arrivals` has the bytes so far, and when the last of them came.
    """
    if not arrivals:
        return 0, 0.0
    best = (arrivals[-1][0] - arrivals[0][0], arrivals[-1][1] - arrivals[0][1])
    first = 0
    for received, at in arrivals[1:]:
        while received - arrivals[first + 1][0] >= least:
            first += 1
        count, seconds = received - arrivals[first][0], at - arrivals[first][1]
        if count >= least and 0 < best[0] * seconds < count * best[1]:
            best = (count, seconds)
    return best


def _rate(count: int, seconds: float) -> float:
    return 8 * count / seconds if seconds > 0 else float("inf")


if __name__ == "__main__":
    main()
