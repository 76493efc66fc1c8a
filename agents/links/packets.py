"""Measurement of links with packets: arrival times from the kernel, and the rate of a train of
packets."""

from __future__ import annotations

import errno
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass

from agents.timing.nanoseconds import Nanoseconds

_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
"""Ignore the host's limits, for privileged processes (Linux)."""


def enlarge_receive_buffer(sock: socket.socket, size: int) -> None:
    """Without the privilege, at most the host's limit (net.core.rmem_max)."""
    _enlarge(sock, socket.SO_RCVBUF, _SO_RCVBUFFORCE, size)


def enlarge_send_buffer(sock: socket.socket, size: int) -> None:
    """Without the privilege, at most the host's limit (net.core.wmem_max)."""
    _enlarge(sock, socket.SO_SNDBUF, _SO_SNDBUFFORCE, size)


def _enlarge(sock: socket.socket, option: int, forced: int, size: int) -> None:
    if sys.platform == "linux":
        try:
            sock.setsockopt(socket.SOL_SOCKET, forced, size)
        except PermissionError:
            pass
        else:
            return
    sock.setsockopt(socket.SOL_SOCKET, option, size)


ANCILLARY_BYTES = 64
"""Bytes for the kernel's timestamp in `recvmsg`."""
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("=qq")
_BYTES_MOVED, _MOVED_OFFSET = struct.Struct("=QQ"), 120
"""Format and offset of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info (linux/tcp.h, since
Linux 4.1)."""
_OUT_OF_ORDER, _OUT_OF_ORDER_OFFSET = struct.Struct("=I"), 224
"""Format and offset in bytes of tcpi_rcv_ooopack in struct tcp_info (since Linux 5.4)."""
_ROOM = bytearray(2**20)
"""For MSG_PEEK: the maximum of waiting data that is read to find the last packet's timestamp."""
_LONGEST: Nanoseconds = 10**9
"""Longest plausible time for which data waits for this process: at most one period of its CPU quota, a
second. After longer, the process was paused, or a clock was set."""


def enable_timestamps(sock: socket.socket) -> None:
    """No effect on other systems than Linux, and where Linux is emulated without these times: packets
    then count as arrived when they are read."""
    if sys.platform == "linux":
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise


def bytes_moved(sock: socket.socket) -> int:
    """Acknowledged or sent by the other side; 0 if `sock` is not a TCP socket on Linux."""
    if sys.platform != "linux" or sock.family == socket.AF_UNIX:
        return 0
    try:
        info = socket.socket.getsockopt(
            sock, socket.IPPROTO_TCP, socket.TCP_INFO, _MOVED_OFFSET + _BYTES_MOVED.size
        )
    except OSError:
        return 0
    return sum(_BYTES_MOVED.unpack_from(info, _MOVED_OFFSET)) if len(info) > _MOVED_OFFSET else 0


def arrived_in_order(sock: socket.socket) -> bool:
    """Whether no packet arrived before an earlier one, as far as the kernel tells. After that,
    timestamps are too early: waiting packets that are merged when the missing packet arrives keep their
    own time."""
    if sys.platform != "linux":
        return True
    size = _OUT_OF_ORDER_OFFSET + _OUT_OF_ORDER.size
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    return len(info) < size or _OUT_OF_ORDER.unpack_from(info, _OUT_OF_ORDER_OFFSET) == (0,)


def timestamp_in(ancillary: Iterable[tuple[int, int, bytes]]) -> int:
    """Kernel's timestamp, in ns of the real-time clock; the current time if there is none."""
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, rest = _TIMESPEC.unpack(value[: _TIMESPEC.size])
            return int(seconds) * 1_000_000_000 + int(rest)
    return time.clock_gettime_ns(time.CLOCK_REALTIME)


def arrival_time(sock: socket.socket) -> Nanoseconds:
    """Monotonic time at which the last of the waiting data arrived; the current time if none waits, or
    `sock` is not a TCP socket on Linux (with or without TLS)."""
    waited = 0
    if sys.platform == "linux" and sock.family != socket.AF_UNIX:
        flags = socket.MSG_PEEK | socket.MSG_TRUNC | socket.MSG_DONTWAIT
        try:
            # The base class's method, because SSLSocket forbids recvmsg_into.
            _, ancillary, _, _ = socket.socket.recvmsg_into(sock, [_ROOM], ANCILLARY_BYTES, flags)
        except OSError:
            return time.monotonic_ns()
        waited = time.clock_gettime_ns(time.CLOCK_REALTIME) - timestamp_in(ancillary)
    return time.monotonic_ns() - (waited if 0 < waited < _LONGEST else 0)


# Measurement of a link's rate by trains of packets, one in each direction, timed at the receiver.
#
# Trains use UDP, because long round trips and losses would slow down a short TCP transfer. A train is
# one second of large packets, sent slightly faster than the link's requested rate. The rate is computed
# from the kernel's timestamps of the first and the last packet, and from the number of packets between
# them, also those that the receiver was too slow to read, because the kernel counts them.
#
# The server uses one port. A device sends the request `up RATE` or `down RATE`, and repeats it until the
# server answers: by the permission to start the train, or by the first packet of the server's train.

PORT = 1884
FRAME = 1464
"""Bytes of each packet on the wire, with the Ethernet header. It fits the MTU of an overlay network."""
_PAYLOAD = bytes(FRAME - 14 - 20 - 8)
_GO = b"go"
_TRAIN_SECONDS = 1.0
_MIN_PACKETS, _MAX_PACKETS = 12, 2_700
_SEND_RATE_FACTOR = 1.1
"""Multiple of the requested rate, so that the link is the bottleneck."""
_SEND_AHEAD_SECONDS = 0.15
"""Maximum time by which the sender may be ahead of its rate, so that one on a busy host keeps the link
full."""
_SILENCE_TIMEOUT_SECONDS = 1.0
"""Without a packet for this long, longer on slow links, an incomplete train counts as over."""
_FIRST_PACKET_TIMEOUT_SECONDS = 10.0
_MAX_REQUESTS = 10
_SO_RXQ_OVFL = 40
_SOCKET_BUFFER_BYTES = 4 << 20


def train_length(rate: int) -> int:
    """Packets for a link of `rate` bit/s."""
    return min(max(_MIN_PACKETS, round(rate * _TRAIN_SECONDS / (8 * FRAME))), _MAX_PACKETS)


@dataclass(slots=True)
class TrainArrivals:
    """Times are in ns."""

    first: int = 0
    last: int = 0
    count: int = 0
    missed: int = 0
    """Packets that the kernel dropped, because the receiver did not read them in time, but not those
    after the last one read."""
    _missed_before: int = 0

    def add(self, at: int, missed: int) -> None:
        """`at`: ns. `missed`: packets that the kernel has dropped at the socket so far."""
        if not self.count:
            self.first, self._missed_before = at, missed
        self.last, self.missed = at, missed - self._missed_before
        self.count += 1

    @property
    def rate(self) -> float:
        """bit/s on the wire; 0 for fewer than two packets."""
        if self.last <= self.first:
            return 0.0
        return 8e9 * FRAME * (self.count - 1 + self.missed) / (self.last - self.first)


def upload_train(host: str, rate: int, timeout: float) -> float:
    """Rate to the server, in bit/s on the wire. `rate`: requested. `timeout`: seconds for each answer,
    beside the duration of the train. Raises OSError."""
    with closing(_timestamping_socket()) as sock:
        sock.connect((host, PORT))
        _request(sock, f"up {rate}".encode(), timeout)
        _send_train(sock, rate)
        sock.settimeout(timeout + 2 * _silence(rate) + 2 * _TRAIN_SECONDS)
        while True:
            answer = sock.recv(2048)
            if answer.startswith(b"{"):
                return TrainArrivals(**json.loads(answer)).rate


def download_train(host: str, rate: int, timeout: float) -> float:
    """Rate from the server, in bit/s on the wire. `rate`: requested. `timeout`: seconds for each answer,
    beside the duration of the train. Raises OSError."""
    with closing(_timestamping_socket()) as sock:
        sock.connect((host, PORT))
        first = _request(sock, f"down {rate}".encode(), timeout)
        return _receive_train(sock, rate, first).rate


def listen_for_trains(address: str, port: int = PORT) -> None:
    """Threads that run until the process ends. Raises OSError."""
    listening = _bound_socket(address, port)
    threading.Thread(target=_serve, args=(listening,), name="packettrain", daemon=True).start()


def _serve(listening: socket.socket) -> None:
    """Each device gets a socket, because the kernel counts dropped packets per socket."""
    busy: set[tuple[str, int]] = set()

    def answer(peer: tuple[str, int], request: bytes) -> None:
        with suppress(OSError, ValueError), closing(_bound_socket(*listening.getsockname())) as sock:
            sock.connect(peer)
            _answer(sock, request)
        busy.discard(peer)

    while True:
        request, peer = listening.recvfrom(2048)
        if peer not in busy:  # otherwise an earlier copy of the request is being answered
            busy.add(peer)
            threading.Thread(target=answer, args=(peer, request), daemon=True).start()


def _answer(sock: socket.socket, request: bytes) -> None:
    way, rate = request.decode().split()
    if way == "down":
        _send_train(sock, int(rate))
    elif way == "up":
        sock.send(_GO)
        found = _receive_train(sock, int(rate), TrainArrivals())
        result = {name: getattr(found, name) for name in ("first", "last", "count", "missed")}
        for _ in range(3):  # in case packets are lost
            sock.send(json.dumps(result).encode())
            time.sleep(0.1)


def _request(sock: socket.socket, request: bytes, timeout: float) -> TrainArrivals:
    """Repeat until a packet arrives: the first of a train, or the permission to start one. Raises
    OSError."""
    sock.settimeout(timeout)
    for _ in range(_MAX_REQUESTS):
        sock.send(request)
        with suppress(TimeoutError):
            found = TrainArrivals()
            _, at, missed = _arrival(sock)
            found.add(at, missed)
            return found
    raise TimeoutError(f"no answer in {_MAX_REQUESTS * timeout:.0f} s")


def _send_train(sock: socket.socket, rate: int) -> None:
    interval = 8 * FRAME / (rate * _SEND_RATE_FACTOR)
    begin = time.monotonic()
    for number in range(train_length(rate)):
        if (ahead := begin + number * interval - time.monotonic()) > _SEND_AHEAD_SECONDS:
            time.sleep(ahead - _SEND_AHEAD_SECONDS / 2)
        with suppress(BlockingIOError, ConnectionRefusedError):
            sock.send(_PAYLOAD)


def _receive_train(sock: socket.socket, rate: int, found: TrainArrivals) -> TrainArrivals:
    """Add the packets of a train to `found`. If the request arrives again, it is answered again: the
    first answer was lost."""
    with suppress(TimeoutError):
        while found.count + found.missed < train_length(rate):
            sock.settimeout(_silence(rate) if found.count else _FIRST_PACKET_TIMEOUT_SECONDS)
            size, at, missed = _arrival(sock)
            if size == len(_PAYLOAD):
                found.add(at, missed)
            else:
                sock.send(_GO)
    return found


def _silence(rate: int) -> float:
    return max(_SILENCE_TIMEOUT_SECONDS, 20 * 8 * FRAME / rate)


def _arrival(sock: socket.socket) -> tuple[int, int, int]:
    """Size in bytes, arrival time in ns, and packets that the kernel has dropped at this socket so
    far."""
    data, ancillary, _, _ = sock.recvmsg(2048, 128)
    missed = 0
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_RXQ_OVFL):
            missed = int.from_bytes(value[:4], "little")
    return len(data), timestamp_in(ancillary), missed


def _timestamping_socket() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    enable_timestamps(sock)
    sock.setsockopt(socket.SOL_SOCKET, _SO_RXQ_OVFL, 1)
    enlarge_send_buffer(sock, _SOCKET_BUFFER_BYTES)
    enlarge_receive_buffer(sock, _SOCKET_BUFFER_BYTES)
    return sock


def _bound_socket(address: str, port: int) -> socket.socket:
    sock = _timestamping_socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, port))
    return sock
