"""When packets came, by the kernel's clock: when a process gets to read them is its own affair."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable

_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("=qq")


def stamp(sock: socket.socket) -> None:
    """Have the packets of `sock` stamped on arrival."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def arrived(ancillary: Iterable[tuple[int, int, bytes]]) -> int:
    """When the packet came that `recvmsg` tells of, in ns of the real-time clock: now, if it has no
    stamp."""
    for level, what, value in ancillary:
        if (level, what) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, rest = _TIMESPEC.unpack(value[: _TIMESPEC.size])
            return int(seconds) * 1_000_000_000 + int(rest)
    return time.clock_gettime_ns(time.CLOCK_REALTIME)
