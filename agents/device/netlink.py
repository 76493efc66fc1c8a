"""Read the queues and sockets of this network namespace from the kernel by netlink. A call of `tc` or
`ss` would cost a slow device some per cent of its CPU time; pyroute2 takes 15 times as long for a look
at the queues (35 and 550 µs), and 12 MB of an init's memory (27)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

_ERROR, _DONE = 2, 3
_REQUEST, _REQUEST_DUMP = 0x001, 0x301
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_MAX_ANSWER_BYTES = 64 * 1024

_GET_QDISC = 38
_QDISC = struct.Struct("=BxxxiIII")
"""struct tcmsg: family, interface, handle, parent, info."""
_STATISTICS, _BASIC, _QUEUE = 7, 1, 3
"""TCA_STATS2, TCA_STATS_BASIC, TCA_STATS_QUEUE (linux/rtnetlink.h, linux/gen_stats.h)."""
_BYTES, _LENGTH_AND_BACKLOG = struct.Struct("=Q"), struct.Struct("=II")

_SOCK_DIAG, _BY_FAMILY = 4, 20
"""NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY (linux/sock_diag.h)."""
_TCP_INFO, _ESTABLISHED = 2, 1 << 1
"""INET_DIAG_INFO, the mask of TCP_ESTABLISHED (linux/inet_diag.h)."""
_SOCKETS = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 1 << (_TCP_INFO - 1), _ESTABLISHED)
_ANY = bytes(48)
"""In place of the struct inet_diag_sockid of a socket."""
_STATE, _ID, _SOURCE, _SOCKET_BYTES = 1, slice(4, 52), 8, 72
"""Places in a struct inet_diag_msg: state, id, the first byte of the own address; and its length."""
_IS_ESTABLISHED, _LOOPBACK = 1, 127
_FIELD = struct.Struct("=I")
_UNACKNOWLEDGED, _LAST_ACKNOWLEDGED, _UNSENT = 24, 56, 144
"""Offsets of tcpi_unacked, tcpi_last_ack_recv (ms) and tcpi_notsent_bytes in struct tcp_info
(linux/tcp.h, since Linux 4.6)."""


class Queue(NamedTuple):
    """Counters of a queueing discipline."""

    left: int
    """Bytes that have left it."""
    waiting: int
    """Bytes in it, those in its children included."""


class Connection(NamedTuple):
    """A TCP connection."""

    unsent: int
    """Bytes that its process has handed over and TCP has not sent yet."""
    unanswered: float
    """Seconds for which the other side has acknowledged nothing, though something waits for that."""


class Netlink:
    """Raises OSError where the kernel does not answer, or not with what was asked for."""

    def __init__(self) -> None:
        self._route = _opened(socket.NETLINK_ROUTE)
        self._diag: socket.socket | None = _opened(_SOCK_DIAG)
        """None: this kernel says nothing of sockets."""
        self._known: list[bytes] = []
        """Ids of the connections: to list them, the kernel looks through those of the whole host."""

    def queues(self) -> dict[tuple[int, int], Queue]:
        """Counters by number of the interface and major number of the handle (16 for `10:`)."""
        found = {}
        for answer in _dump(self._route, _GET_QDISC, bytes(_QDISC.size)):
            _, interface, handle, _, _ = _QDISC.unpack_from(answer)
            for kind, statistics in _attributes(answer[_QDISC.size :]):
                if kind == _STATISTICS:
                    values = dict(_attributes(statistics))
                    (left,) = _BYTES.unpack_from(values[_BASIC])
                    _, waiting = _LENGTH_AND_BACKLOG.unpack_from(values[_QUEUE])
                    found[interface, handle >> 16] = Queue(left, waiting)
        return found

    def connections(self) -> list[Connection]:
        """The established TCP connections with other hosts, of IPv4; none if the kernel says nothing of
        sockets."""
        if self._diag is None:
            return []
        try:
            if self._known:
                return [_connection(_ask(self._diag, _BY_FAMILY, _SOCKETS + one)) for one in self._known]
        except OSError:  # one has ended
            self._known = []
        try:
            found = [*_dump(self._diag, _BY_FAMILY, _SOCKETS + _ANY)]
        except OSError:
            self._diag.close()
            self._diag = None
            return []
        found = [one for one in found if one[_SOURCE] != _LOOPBACK]
        self._known = [bytes(one[_ID]) for one in found]
        return [*map(_connection, found)]

    def close(self) -> None:
        self._route.close()
        if self._diag is not None:
            self._diag.close()


def _opened(protocol: int) -> socket.socket:
    found = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    found.settimeout(1.0)
    return found


def _connection(answer: memoryview) -> Connection:
    """A connection, of a struct inet_diag_msg and its attributes. Raises OSError if it is not
    established any more."""
    if answer[_STATE] != _IS_ESTABLISHED:
        raise OSError("the connection is closed")
    info = dict(_attributes(answer[_SOCKET_BYTES:])).get(_TCP_INFO, b"")
    if len(info) < _UNSENT + _FIELD.size:
        return Connection(0, 0.0)
    waiting, silent, unsent = (
        int(_FIELD.unpack_from(info, offset)[0])
        for offset in (_UNACKNOWLEDGED, _LAST_ACKNOWLEDGED, _UNSENT)
    )
    return Connection(unsent, silent / 1000 if waiting else 0.0)


def _ask(netlink: socket.socket, kind: int, question: bytes) -> memoryview:
    """Return the answer to `question`, without its header. Raises OSError."""
    netlink.send(_HEADER.pack(_HEADER.size + len(question), kind, _REQUEST, 0, 0) + question)
    answer = memoryview(netlink.recv(_MAX_ANSWER_BYTES))
    if _HEADER.unpack_from(answer)[1] == _ERROR:
        raise OSError(f"netlink refuses request {kind}")
    return answer[_HEADER.size :]


def _dump(netlink: socket.socket, kind: int, question: bytes) -> Iterator[memoryview]:
    """Yield each answer to `question`, without its header. Raises OSError."""
    size = _HEADER.size + len(question)
    netlink.send(_HEADER.pack(size, kind, _REQUEST_DUMP, 0, 0) + question)
    while True:
        answers = memoryview(netlink.recv(_MAX_ANSWER_BYTES))
        at = 0
        while at + _HEADER.size <= len(answers):
            length, of, *_ = _HEADER.unpack_from(answers, at)
            if of == _DONE:
                return
            if of == _ERROR or length < _HEADER.size:
                raise OSError(f"netlink refuses request {kind}")
            yield answers[at + _HEADER.size : at + length]
            at += length + 3 & ~3


def _attributes(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind & 0x3FFF, data[at + _ATTRIBUTE.size : at + length]
        at += length + 3 & ~3
