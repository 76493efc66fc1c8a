"""Round trips of single packets: ICMP echoes, which the other side's kernel answers by itself.

So neither its processes nor TCP's retransmissions are in the figures. The socket is the kernel's "ping
socket", which takes no privilege where `net.ipv4.ping_group_range` allows our group.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from contextlib import closing

from agents import stamps

_ECHO, _REPLY = 8, 0
_HEADER = struct.Struct(">BBHHH")  # type, code, checksum, id, sequence number; the kernel fills in two
SIZE = 64
"""Bytes of each packet, its IP header included; on the wire Ethernet's 14 come on top."""
_PAYLOAD = bytes(SIZE - 20 - _HEADER.size)
_MAX_SEQUENCE_NUMBERS = 65_536
_AHEAD = 5
"""Tries to have one echo answered before those that count."""


def round_trips(host: str, count: int, every: float, patience: float) -> list[float | None]:
    """Seconds of each of `count` round trips to `host`, one sent `every` seconds.

    None: lost, or not back `patience` seconds after the last was sent. One goes ahead and does not
    count: packets that come while a router has yet to learn of their flow are lost. Raises OSError, and
    ValueError for more than 65,535.
    """
    if not 0 < count < _MAX_SEQUENCE_NUMBERS:
        raise ValueError(f"count is {count}, expected 1 to {_MAX_SEQUENCE_NUMBERS - 1}")
    sent: list[int] = []
    found: list[float | None] = [None] * count
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)) as sock:
        stamps.stamp(sock)
        sock.connect((host, 0))
        for _ in range(_AHEAD):
            _send(sock, count)
            if select.select([sock], [], [], patience)[0]:
                break
        begin = time.monotonic()
        end = begin + (count - 1) * every + patience
        while (now := time.monotonic()) < end and (len(sent) < count or None in found):
            if len(sent) < count and now >= begin + len(sent) * every:
                sent.append(time.clock_gettime_ns(time.CLOCK_REALTIME))
                _send(sock, len(sent) - 1)
                continue
            due = begin + len(sent) * every if len(sent) < count else end
            if select.select([sock], [], [], max(0.0, due - now))[0]:
                number, at = _received(sock)
                if number < len(sent):
                    found[number] = (at - sent[number]) / 1e9
    return found


def _send(sock: socket.socket, number: int) -> None:
    sock.send(_HEADER.pack(_ECHO, 0, 0, 0, number) + _PAYLOAD)


def _received(sock: socket.socket) -> tuple[int, int]:
    """Sequence number of an answer, and when it came: ns of the real-time clock."""
    data, ancillary, _, _ = sock.recvmsg(SIZE, 64)
    kind, _, _, _, number = _HEADER.unpack_from(data)
    return (number if kind == _REPLY else _MAX_SEQUENCE_NUMBERS), stamps.arrived(ancillary)
