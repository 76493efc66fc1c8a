"""How fast a device's link really is: a train of packets through it, each way, timed where they arrive.

UDP, so that neither a long round trip nor loss slows it, as they do a short TCP transfer. A train is
a second of full packets, a little faster than the link is asked to be. Its rate is what arrives
between its first and its last packet, by the kernel's clock on arrival; also what the receiver was too
slow to fetch, which the kernel counts.

All goes over one port of the server. A device's socket sends a request, `up RATE` or `down RATE`, and
repeats it until it is answered: by a word that its train may start, or by the first of the server's.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass

from agents import stamps

PORT = 1884
FRAME = 1514
"""Bytes of each packet on the wire, Ethernet header included."""
_PAYLOAD = bytes(FRAME - 14 - 20 - 8)
_GO = b"go"
_SECONDS = 1.0
_LEAST, _MOST = 12, 2_700
"""Packets."""
_FASTER = 1.1
"""Than asked, so that the link is what limits it."""
_AHEAD = 0.15
"""Seconds of the train that may wait for the link, so that a sender on a busy host keeps it full."""
_SILENCE = 1.0
"""Seconds without a packet after which a train is over that has lost some; or some packets' time."""
_BEGIN = 10.0
"""Seconds until a train must have begun."""
_TRIES = 10
_SO_RXQ_OVFL = 40
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_BUFFER = 4 << 20


def length(rate: int) -> int:
    """Packets of a train for a link of `rate` bit/s."""
    return min(max(_LEAST, round(rate * _SECONDS / (8 * FRAME))), _MOST)


@dataclass(slots=True)
class Arrivals:
    """What is known of a train at its receiver; times in ns."""

    first: int = 0
    last: int = 0
    count: int = 0
    missed: int = 0
    """Packets that the receiver did not fetch in time, up to the last that it did."""
    _missed_before: int = 0

    def add(self, at: int, missed: int) -> None:
        if not self.count:
            self.first, self._missed_before = at, missed
        self.last, self.missed = at, missed - self._missed_before
        self.count += 1

    @property
    def rate(self) -> float:
        """bit/s on the wire; 0 for less than two packets."""
        if self.last <= self.first:
            return 0.0
        return 8e9 * FRAME * (self.count - 1 + self.missed) / (self.last - self.first)


def upload(host: str, rate: int, patience: float) -> float:
    """bit/s on the wire from here to the server, on a link of `rate` bit/s.

    `patience`: how many seconds an answer may take, beside the train. Raises OSError where none comes.
    """
    with closing(_socket()) as sock:
        sock.connect((host, PORT))
        _ask(sock, f"up {rate}".encode(), patience)
        _send_train(sock, rate)
        sock.settimeout(patience + 2 * _silence(rate) + 2 * _SECONDS)
        while True:
            answer = sock.recv(2048)
            if answer.startswith(b"{"):
                return Arrivals(**json.loads(answer)).rate


def download(host: str, rate: int, patience: float) -> float:
    """As `upload`, from the server to here."""
    with closing(_socket()) as sock:
        sock.connect((host, PORT))
        first = _ask(sock, f"down {rate}".encode(), patience)
        return _receive_train(sock, rate, first).rate


def listen(address: str, port: int = PORT) -> None:
    """Answer devices at `address`, in threads of this process, as long as it lives. Raises OSError."""
    listening = _bound(address, port)
    threading.Thread(target=_serve, args=(listening,), name="packettrain", daemon=True).start()


def _serve(listening: socket.socket) -> None:
    """Each device that asks gets a socket of its own: the kernel counts what each was too slow for."""
    busy: set[tuple[str, int]] = set()

    def answer(peer: tuple[str, int], request: bytes) -> None:
        with suppress(OSError, ValueError), closing(_bound(*listening.getsockname())) as sock:
            sock.connect(peer)
            _answer(sock, request)
        busy.discard(peer)

    while True:
        request, peer = listening.recvfrom(2048)
        if peer not in busy:  # else repeated: the answer is under way
            busy.add(peer)
            threading.Thread(target=answer, args=(peer, request), daemon=True).start()


def _answer(sock: socket.socket, request: bytes) -> None:
    way, rate = request.decode().split()
    if way == "down":
        _send_train(sock, int(rate))
    elif way == "up":
        sock.send(_GO)
        found = _receive_train(sock, int(rate), Arrivals())
        told = {name: getattr(found, name) for name in ("first", "last", "count", "missed")}
        for _ in range(3):  # one of them will not be lost
            sock.send(json.dumps(told).encode())
            time.sleep(0.1)


def _ask(sock: socket.socket, request: bytes, patience: float) -> Arrivals:
    """Send `request` until something comes, which is the first of a train or says that one may start."""
    sock.settimeout(patience)
    for _ in range(_TRIES):
        sock.send(request)
        with suppress(TimeoutError):
            found = Arrivals()
            _, at, missed = _arrival(sock)
            found.add(at, missed)
            return found
    raise TimeoutError(f"no answer in {_TRIES * patience:.0f} s")


def _send_train(sock: socket.socket, rate: int) -> None:
    every = 8 * FRAME / (rate * _FASTER)
    begin = time.monotonic()
    for number in range(length(rate)):
        if (ahead := begin + number * every - time.monotonic()) > _AHEAD:
            time.sleep(ahead - _AHEAD / 2)
        with suppress(BlockingIOError, ConnectionRefusedError):
            sock.send(_PAYLOAD)


def _receive_train(sock: socket.socket, rate: int, found: Arrivals) -> Arrivals:
    """Until it is over; `found` has what has come already. Who asks again has not heard the answer."""
    with suppress(TimeoutError):
        while found.count + found.missed < length(rate):
            sock.settimeout(_silence(rate) if found.count else _BEGIN)
            size, at, missed = _arrival(sock)
            if size == len(_PAYLOAD):
                found.add(at, missed)
            else:
                sock.send(_GO)
    return found


def _silence(rate: int) -> float:
    return max(_SILENCE, 20 * 8 * FRAME / rate)


def _arrival(sock: socket.socket) -> tuple[int, int, int]:
    """Bytes of the next packet, when it came, in ns, and how many the kernel had to drop at this socket
    till then."""
    data, told, _, _ = sock.recvmsg(2048, 128)
    missed = 0
    for level, what, value in told:
        if (level, what) == (socket.SOL_SOCKET, _SO_RXQ_OVFL):
            missed = int.from_bytes(value[:4], "little")
    return len(data), stamps.arrived(told), missed


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    stamps.stamp(sock)
    sock.setsockopt(socket.SOL_SOCKET, _SO_RXQ_OVFL, 1)
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        with suppress(PermissionError):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return sock


def _bound(address: str, port: int) -> socket.socket:
    sock = _socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, port))
    return sock
