"""Arrival times of packets, from the kernel's timestamps. The time at which a process reads a packet is
not used, because that time depends on the host's load and on the process's CPU quota."""

from __future__ import annotations

import errno
import socket
import struct
import sys
import time
from collections.abc import Iterable

from agents.timing.nanoseconds import Nanoseconds

ANCILLARY_BYTES = 64
"""Size in bytes of the buffer in which `recvmsg` returns the kernel's timestamp."""
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("=qq")
_BYTES_MOVED, _MOVED_OFFSET = struct.Struct("=QQ"), 120
"""Format and offset in bytes of the fields tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info
(linux/tcp.h, since Linux 4.1)."""
_OUT_OF_ORDER, _OUT_OF_ORDER_OFFSET = struct.Struct("=I"), 224
"""Format and offset in bytes of the field tcpi_rcv_ooopack in struct tcp_info (since Linux 5.4)."""
_ROOM = bytearray(2**20)
"""Buffer for MSG_PEEK. The size of the buffer is the maximum amount of waiting data that is read to find
the last packet's timestamp."""
_LONGEST: Nanoseconds = 10**9
"""Longest plausible time in ns for which data waits for this process. A process waits for its CPU quota
for at most one period, which is at most a second. A longer wait means that the process was paused or
that a clock was set."""


def enable_timestamps(sock: socket.socket) -> None:
    """Let the kernel record the arrival times of packets at `sock`. No effect on other systems than
    Linux, and where Linux is emulated without these times: packets then count as arrived when they are
    read."""
    if sys.platform == "linux":
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise


def bytes_moved(sock: socket.socket) -> int:
    """Return the number of bytes that the other side of `sock` has acknowledged or sent; 0 if `sock` is
    not a TCP socket on Linux."""
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
    """Return whether no packet of the TCP connection `sock` arrived before an earlier one, as far as the
    kernel tells. After such an arrival, timestamps are too early: waiting packets that are merged when
    the missing packet arrives keep their own time."""
    if sys.platform != "linux":
        return True
    size = _OUT_OF_ORDER_OFFSET + _OUT_OF_ORDER.size
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    return len(info) < size or _OUT_OF_ORDER.unpack_from(info, _OUT_OF_ORDER_OFFSET) == (0,)


def timestamp_in(ancillary: Iterable[tuple[int, int, bytes]]) -> int:
    """Return the kernel's timestamp in the ancillary data of `recvmsg`, in ns of the real-time clock;
    the current time if the ancillary data has no timestamp."""
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, rest = _TIMESPEC.unpack(value[: _TIMESPEC.size])
            return int(seconds) * 1_000_000_000 + int(rest)
    return time.clock_gettime_ns(time.CLOCK_REALTIME)


def arrival_time(sock: socket.socket) -> Nanoseconds:
    """Return the monotonic time at which the last of the data waiting in `sock` arrived. If no data
    waits, or if `sock` is not a TCP socket on Linux (with or without TLS), return the current time."""
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
