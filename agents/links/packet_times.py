"""Arrival times of packets by the kernel's timestamps: when a process reads a packet depends on the
host's load and on its CPU quota."""

from __future__ import annotations

import errno
import socket
import struct
import sys
import time
from collections.abc import Iterable

from agents.timing.nanoseconds import Nanoseconds

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
