"""When packets arrived, by the kernel's timestamps: when a process gets to read them depends on how busy
it is, and on the slices of its share of the CPU."""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Iterable

from agents.timing.nanoseconds import Nanoseconds

ANCILLARY_BYTES = 64
"""Room for the timestamp in `recvmsg`."""
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("=qq")
_BYTES_MOVED, _MOVED_OFFSET = struct.Struct("=QQ"), 120
"""tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info (linux/tcp.h, since Linux 4.1)."""
_ROOM = bytearray(2**20)
"""Bytes that are looked through for the last one; none is copied."""
_LONGEST: Nanoseconds = 10**9
"""A slice comes after a second at the latest, as the kernel has no longer periods. Where more seems to
have passed, the process was paused or a clock was set."""


def timestamp(sock: socket.socket) -> None:
    """Have the kernel note when the packets of `sock` arrive."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def moved(sock: socket.socket) -> int:
    """Bytes of `sock` that the other side has acknowledged, and that it has sent; 0 where the kernel
    does not say: it does of TCP on Linux."""
    if sys.platform != "linux" or sock.family == socket.AF_UNIX:
        return 0
    try:
        info = socket.socket.getsockopt(
            sock, socket.IPPROTO_TCP, socket.TCP_INFO, _MOVED_OFFSET + _BYTES_MOVED.size
        )
    except OSError:
        return 0
    return sum(_BYTES_MOVED.unpack_from(info, _MOVED_OFFSET)) if len(info) > _MOVED_OFFSET else 0


def in_ancillary(ancillary: Iterable[tuple[int, int, bytes]]) -> int:
    """The kernel's timestamp in the ancillary data of `recvmsg`: ns of the real-time clock. Without one,
    the current time."""
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, rest = _TIMESPEC.unpack(value[: _TIMESPEC.size])
            return int(seconds) * 1_000_000_000 + int(rest)
    return time.clock_gettime_ns(time.CLOCK_REALTIME)


def of_waiting(sock: socket.socket) -> Nanoseconds:
    """The monotonic time at which all that waits in `sock` to be read had arrived; the current time
    where nothing waits, or the kernel does not say: it does of TCP on Linux, below TLS too."""
    waited = 0
    if sys.platform == "linux" and sock.family != socket.AF_UNIX:
        flags = socket.MSG_PEEK | socket.MSG_TRUNC | socket.MSG_DONTWAIT
        try:
            # The class's own method: an SSLSocket does not allow its own.
            _, ancillary, _, _ = socket.socket.recvmsg_into(sock, [_ROOM], ANCILLARY_BYTES, flags)
        except OSError:
            return time.monotonic_ns()
        waited = time.clock_gettime_ns(time.CLOCK_REALTIME) - in_ancillary(ancillary)
    return time.monotonic_ns() - (waited if 0 < waited < _LONGEST else 0)
