"""Counters of the queues that shape a device's link, read from the kernel by netlink: a call of `tc`
would cost a slow device some per cent of its CPU time."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

_GET_QDISC, _NEW_QDISC, _ERROR, _DONE = 38, 36, 2, 3
_REQUEST, _DUMP = 0x001, 0x300
_STATISTICS, _BASIC, _QUEUE = 7, 1, 3
"""TCA_STATS2, TCA_STATS_BASIC, TCA_STATS_QUEUE (linux/rtnetlink.h, linux/gen_stats.h)."""
_HEADER = struct.Struct("=IHHII")
_QDISC = struct.Struct("=BxxxiIII")
"""struct tcmsg: family, interface, handle, parent, info."""
_ATTRIBUTE = struct.Struct("=HH")
_BYTES, _LENGTH_AND_BACKLOG = struct.Struct("=Q"), struct.Struct("=II")
_REQUEST_ALL = _HEADER.pack(_HEADER.size + _QDISC.size, _GET_QDISC, _REQUEST | _DUMP, 0, 0)
_MAX_ANSWER_BYTES = 64 * 1024


class Counters(NamedTuple):
    """Counters of a queueing discipline."""

    left: int
    """Bytes that have left it."""
    waiting: int
    """Bytes in it, those in its children included."""


class Qdiscs:
    """The queueing disciplines of this network namespace."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._netlink.settimeout(1.0)

    def read(self) -> dict[tuple[int, int], Counters]:
        """Counters by number of the interface and major number of the handle (16 for `10:`).
        Raises OSError."""
        self._netlink.send(_REQUEST_ALL + _QDISC.pack(0, 0, 0, 0, 0))
        found: dict[tuple[int, int], Counters] = {}
        while True:
            answer = memoryview(self._netlink.recv(_MAX_ANSWER_BYTES))
            at = 0
            while at < len(answer):
                length, kind, *_ = _HEADER.unpack_from(answer, at)
                if kind == _DONE:
                    return found
                if kind == _ERROR or length < _HEADER.size:
                    raise OSError("the kernel does not list the queueing disciplines")
                if kind == _NEW_QDISC:
                    _, interface, handle, _, _ = _QDISC.unpack_from(answer, at + _HEADER.size)
                    counters = _counters(answer[at + _HEADER.size + _QDISC.size : at + length])
                    if counters is not None:
                        found[interface, handle >> 16] = counters
                at += length + 3 & ~3

    def close(self) -> None:
        self._netlink.close()


def _counters(attributes: memoryview) -> Counters | None:
    for kind, statistics in _attributes(attributes):
        if kind == _STATISTICS:
            values = dict(_attributes(statistics))
            if _BASIC in values and _QUEUE in values:
                (left,) = _BYTES.unpack_from(values[_BASIC])
                _, waiting = _LENGTH_AND_BACKLOG.unpack_from(values[_QUEUE])
                return Counters(left, waiting)
    return None


def _attributes(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind & 0x3FFF, data[at + _ATTRIBUTE.size : at + length]
        at += length + 3 & ~3
