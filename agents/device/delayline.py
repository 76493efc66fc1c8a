"""Delay, jitter and loss in userspace: a delay line for links, and the kernel's nfnetlink_queue that
feeds it."""

from __future__ import annotations

import errno
import heapq
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agents.links.packets import enlarge_receive_buffer
from agents.timing.clock import make_realtime

# Client of the kernel's nfnetlink_queue, which passes the packets of an NFQUEUE rule to a process.
#
# The kernel holds the packets. This process gets only the number of each (copy mode META), and sends a
# verdict. Numbers increase within a queue, so one message can accept all packets up to one. Formats and
# constants: linux/netfilter/nfnetlink_queue.h. Every message needs CAP_NET_ADMIN in the network
# namespace: a process that drops it can no longer send verdicts.
#
# Fail closed: the kernel drops packets of a queue that no process is bound to, and those for which the
# queue or the socket's buffer has no space (provided that the rule has no --queue-bypass). Closing the
# socket drops all held packets.

_NETLINK_NETFILTER = 12
_SOL_NETLINK, _NETLINK_NO_ENOBUFS = 270, 5
_REQUEST, _ACK = 0x1, 0x4
_NLMSG_ERROR = 2
_SUBSYSTEM = 3 << 8  # NFNL_SUBSYS_QUEUE
_PACKET, _VERDICT, _CONFIG, _VERDICT_BATCH = (_SUBSYSTEM | kind for kind in range(4))
_PACKET_HDR, _VERDICT_HDR = 1, 2
_CFG_CMD, _CFG_PARAMS, _CFG_MAXLEN, _CFG_MASK, _CFG_FLAGS = range(1, 6)
_BIND = 1
_COPY_META = 1
_GSO = 1 << 2
_DROP, _ACCEPT = 0, 1

_HEADER = struct.Struct("=IHHIIBB")  # nlmsghdr, then family and version of nfgenmsg
_NUMBER = struct.Struct(">H")  # rest of nfgenmsg: the queue
_ATTRIBUTE = struct.Struct("=HH")
_TWO_WORDS = struct.Struct(">II")
_BUFFER = 16 << 20
"""Bytes of the buffer for notices that wait to be received, about 1 KiB each. The kernel doubles this
value."""
_NOTICE_SIZE = 1024
"""Maximum length of a notice in bytes. A notice without payload has about 200 bytes."""
_TABLE = Path("/proc/thread-self/net/netfilter/nfnetlink_queue")

_PACKET_TYPE = struct.pack("=H", _PACKET)
_VERDICT_ATTRIBUTE = _ATTRIBUTE.pack(12, _VERDICT_HDR)
_HDR_ATTRIBUTE = _ATTRIBUTE.pack(11, _PACKET_HDR)
_NOTICE = struct.Struct(">18xH4xI")
"""Queue and packet number in a notice whose first attribute is the packet header."""
Notice = tuple[int, int]


class QueueError(Exception):
    """The kernel does not provide a queue or refuses a request; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """Counters that the kernel reports."""

    held: int
    """Packets that wait for a verdict."""
    overrun: int
    """Packets dropped because the queue or the socket's buffer was full."""


class PacketQueues:
    """A netlink socket and the queues bound to it. Closing it drops all held packets.

    Only one thread may receive; the other methods may be called from any thread. Raises QueueError if
    the kernel has no nfnetlink.
    """

    def __init__(self) -> None:
        try:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        except OSError as error:
            raise QueueError(f"the kernel has no nfnetlink: {error.strerror}") from error
        self._socket.bind((0, 0))
        # Overruns are read from the kernel's counters. If they were reported as errors, each error would
        # also stop the flow until the buffer is empty.
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_NO_ENOBUFS, 1)
        enlarge_receive_buffer(self._socket, _BUFFER)
        self._pending: list[bytes] = []

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """Readable while notices wait to be received."""
        return self._socket.fileno()

    def bind(self, queue: int, length: int, *, merged: bool) -> None:
        """`length`: packets; further ones are dropped. `merged`: packets that the kernel has merged
        (GSO) stay so. Not while another thread receives. Raises QueueError, and ValueError for an
        impossible queue number."""
        if not 0 <= queue <= 0xFFFF:
            raise ValueError(f"queue number is {queue}, expected 0 to 65535")
        attributes = [
            _attribute(_CFG_CMD, struct.pack(">BxH", _BIND, 0)),
            _attribute(_CFG_PARAMS, struct.pack(">IB", 0, _COPY_META)),
            _attribute(_CFG_MAXLEN, struct.pack(">I", length)),
            *_flags(merged=merged),
        ]
        self._socket.send(_message(_CONFIG, queue, attributes, _REQUEST | _ACK))
        if code := self._acknowledged():
            raise QueueError(self._refusal(queue, code))

    def set_merged(self, queue: int, *, merged: bool) -> None:
        """Whether packets that the kernel has merged (GSO, up to 64 KiB) stay so from now on, which
        costs less CPU time. Otherwise they are split into the packets on the wire."""
        self._socket.send(_message(_CONFIG, queue, _flags(merged=merged), _REQUEST))

    def receive(self, limit: int = 64) -> list[Notice]:
        """At most about `limit` packets that have arrived, oldest first, without waiting. Raises
        QueueError if the kernel reports that a queue is no longer bound to this socket."""
        if self._pending:
            data, self._pending = b"".join(self._pending), []
            return parse(data)
        packets: list[Notice] = []
        receive, unpack = self._socket.recv, _NOTICE.unpack_from  # this loop runs once per packet
        try:
            for _ in range(limit):
                data = receive(_NOTICE_SIZE, socket.MSG_DONTWAIT)
                if data[4:6] == _PACKET_TYPE and data[20:24] == _HDR_ATTRIBUTE:
                    packets.append(unpack(data))
                else:
                    packets += parse(data)
        except BlockingIOError:
            pass
        return packets

    def accept(self, upto: Iterable[tuple[int, int]]) -> None:
        """By queue: this packet and all that the queue holds before it."""
        self._verdicts(_VERDICT_BATCH, _ACCEPT, upto)

    def drop(self, packets: Iterable[tuple[int, int]]) -> None:
        """Drop the packet of each pair of queue number and packet number, and no other packets."""
        self._verdicts(_VERDICT, _DROP, packets)

    def state(self) -> dict[int, QueueState]:
        """Return the counters of the queues bound to this socket, by queue number. Raises OSError."""
        own_port = self._socket.getsockname()[0]
        return {
            row[0]: QueueState(held=row[2], overrun=row[5] + row[6])
            for row in _table()
            if row[1] == own_port
        }

    def _verdicts(self, kind: int, verdict: int, packets: Iterable[tuple[int, int]]) -> None:
        head = _HEADER.pack(_HEADER.size + 14, kind, _REQUEST, 0, 0, socket.AF_UNSPEC, 0)
        messages = [
            head + _NUMBER.pack(queue) + _VERDICT_ATTRIBUTE + _TWO_WORDS.pack(verdict, packet)
            for queue, packet in packets
        ]
        if messages:
            self._socket.send(b"".join(messages))

    def _acknowledged(self) -> int:
        """0 or an errno. Notices of packets that arrive before the answer are kept for `receive`."""
        while True:
            data = self._socket.recv(1024)
            kind = _HEADER.unpack_from(data)[1]
            if kind == _NLMSG_ERROR:
                return _error(data)
            self._pending.append(data)

    def _refusal(self, queue: int, code: int) -> str:
        if code == errno.EPERM:
            try:
                owners = {row[0]: row[1] for row in _table()}
            except OSError:
                owners = {}  # only root may read the table
            if queue in owners:
                return f"queue {queue} is used by another process (netlink port {owners[queue]})"
            return f"queue {queue}: no CAP_NET_ADMIN in this network namespace"
        if code == errno.EBUSY:
            return f"queue {queue} is already bound"
        if code == errno.EINVAL:
            return f"queue {queue}: the kernel has no nfnetlink_queue (module of that name)"
        return f"queue {queue}: {os.strerror(code)}"


def parse(data: bytes) -> list[Notice]:
    """Every packet that a netlink datagram reports, which may hold several messages, with attributes in
    any order. Raises QueueError for an error but ENOENT: a packet disappeared before its verdict, e.g.
    because its interface was removed."""
    packets = []
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind = _HEADER.unpack_from(data, at)[:2]
        message = data[at : at + length]
        if kind == _NLMSG_ERROR and (code := _error(message)) not in (0, errno.ENOENT):
            raise QueueError(f"the kernel refused a verdict or a setting: {os.strerror(code)}")
        if kind == _PACKET:
            packets += _packet(message)
        at += max(_aligned(length), _HEADER.size)
    return packets


def _packet(message: bytes) -> list[Notice]:
    (queue,) = _NUMBER.unpack_from(message, _HEADER.size)
    at = _HEADER.size + _NUMBER.size
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _PACKET_HDR:
            (number,) = struct.unpack_from(">I", message, at + _ATTRIBUTE.size)
            return [(queue, number)]
        at += max(_aligned(length), _ATTRIBUTE.size)
    return []


def _error(message: bytes) -> int:
    (code,) = struct.unpack_from("=i", message, 16)
    return -int(code)


def _message(kind: int, queue: int, attributes: list[bytes], flags: int) -> bytes:
    body = _NUMBER.pack(queue) + b"".join(attributes)
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, 0, 0, socket.AF_UNSPEC, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    head = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind)
    return (head + value).ljust(_aligned(_ATTRIBUTE.size + len(value)), b"\0")


def _flags(*, merged: bool) -> list[bytes]:
    value = struct.pack(">I", _GSO if merged else 0)
    return [_attribute(_CFG_MASK, struct.pack(">I", _GSO)), _attribute(_CFG_FLAGS, value)]


def _aligned(length: int) -> int:
    return -(-length // 4) * 4


def _table() -> list[list[int]]:
    """Kernel's table: queue number, port, held packets, copy mode, copy range, overruns of the queue,
    overruns of the socket, and others."""
    return [[int(field) for field in line.split()] for line in _TABLE.read_text().splitlines()]


# A delay line in userspace: delay, jitter and loss of a link on kernels without sch_netem, and of the
# segments that devices share. (`agents.device.link` shapes a device's own rate.)
#
# It works on the receiving side: an iptables rule sends received packets to an NFQUEUE, where the kernel
# holds each until it is due. On the sending side, TCP would slow down, because it counts packets that
# its own host holds.
#
# Fail closed: the rules have no --queue-bypass. So the kernel drops all packets of a queue while no
# delay line serves it: before it starts, and after it ends for any reason.
#
# A delay line should have its own process, without CPU quota and with CAP_SYS_NICE. Otherwise it is late
# when it is throttled, waits for a core, or waits for a thread that holds Python's lock.

_LENGTH = 65536
"""Maximum number of packets in a queue. A link of 1 Gbit/s carries 42,000 full packets in 0.5 s."""
_BATCH = 64
"""Packets received in one call: so few that those that become due meanwhile wait much less than 1 ms."""
_DOZE, _NAP = 0.010, 0.005
"""A sleep longer than _DOZE seconds is shortened by _NAP, because the kernel may end it 0.1 to 0.5 %
late."""

_EARLY_MAX = 0.0005
"""Maximum seconds by which a packet may be accepted early, to compensate for late ones, so that the mean
delay is right."""


@dataclass(frozen=True, slots=True)
class Impairment:
    """One direction of a link; loss 1 is an outage. Raises ValueError."""

    delay: float = 0.0
    """One-way seconds."""
    jitter: float = 0.0
    """The delay is uniform in delay ± jitter seconds, but never negative."""
    loss: float = 0.0
    """Share of the packets that are dropped, from 0 to 1, independently."""

    def __post_init__(self) -> None:
        for name in ("delay", "jitter"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name):g} s, expected at least 0 s")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss is {self.loss:g}, expected 0 to 1")


@dataclass(slots=True)
class QueueTally:
    """Counters of packets. Totals of times are in seconds, over the accepted packets."""

    arrived: int = 0
    dropped: int = 0
    accepted: int = 0
    held_total: float = 0.0
    late_total: float = 0.0
    """Sum in seconds of the time from each packet's due time until it was accepted, that is, left the
    queue; negative if early."""
    late_max: float = 0.0
    """Seconds."""


@dataclass(slots=True)
class _DelayedQueue:
    impairments: Sequence[Impairment]
    """Impairments that a packet passes one after the other."""
    held: deque[tuple[float, float, int]] = field(default_factory=deque)
    """(due time, arrival time, packet number), oldest first; due times never decrease."""
    tally: QueueTally = field(default_factory=QueueTally)


class DelayLine:
    """Decides for each packet whether to drop it, or when to accept it. No I/O and no clock.

    Packets of a queue never overtake each other: one that would be due before the previous packet,
    because of a smaller jitter or a reduced delay, is due with it. `uniform` returns random numbers in
    [0, 1). Times are seconds of any clock that never goes back. `impairments`: those that a queue's
    packets pass one after the other.
    """

    def __init__(
        self,
        impairments: Mapping[int, Sequence[Impairment]],
        uniform: Callable[[], float],
    ) -> None:
        self._queues = {queue: _DelayedQueue(passed) for queue, passed in impairments.items()}
        self._uniform = uniform
        self._heads: list[tuple[float, int]] = []  # heap of (due time of oldest packet, queue)

    def change(self, queue: int, impairments: Sequence[Impairment]) -> None:
        """Set the impairments of packets that arrive from now on. Held packets keep their due time. May
        be called from any thread."""
        self._queues[queue].impairments = impairments

    def arrive(self, queue: int, packet: int, now: float) -> bool:
        """Return False if the packet must be dropped now."""
        delayed = self._queues[queue]
        delayed.tally.arrived += 1
        due = now
        for impairment in delayed.impairments:  # read once: another thread may change it
            if impairment.loss and self._uniform() < impairment.loss:
                delayed.tally.dropped += 1
                return False
            delay = impairment.delay
            if impairment.jitter:
                delay = max(0.0, delay + impairment.jitter * (2 * self._uniform() - 1))
            due += delay
        if delayed.held:
            due = max(due, delayed.held[-1][0])
        else:
            heapq.heappush(self._heads, (due, queue))
        delayed.held.append((due, now, packet))
        return True

    def next_due(self) -> float | None:
        """None if no packet is held."""
        return self._heads[0][0] if self._heads else None

    def due(self, now: float, early: float = 0.0) -> list[tuple[int, int]]:
        """Release the packets that are due within `early` seconds. Return (queue, last packet): the
        kernel must accept it and all before it in the queue."""
        accepted = []
        heads = self._heads
        while heads and heads[0][0] <= now + early:
            queue = heads[0][1]
            delayed = self._queues[queue]
            accepted.append((queue, _release(delayed, now, early)))
            if delayed.held:
                heapq.heapreplace(heads, (delayed.held[0][0], queue))
            else:
                heapq.heappop(heads)
        return accepted

    def tally(self, queue: int) -> QueueTally:
        """Since the start. The object changes with later packets."""
        return self._queues[queue].tally


def _release(delayed: _DelayedQueue, now: float, early: float) -> int:
    """Remove the packets that are due by `now + early`, at least one; return the last."""
    held, tally = delayed.held, delayed.tally
    last = held[0][2]
    tally.late_max = max(tally.late_max, now - held[0][0])  # the oldest is the latest
    while held and held[0][0] <= now + early:
        due, arrival, last = held.popleft()
        tally.accepted += 1
        tally.held_total += now - arrival
        tally.late_total += now - due
    return last


def _may_be_merged(impairments: Sequence[Impairment]) -> bool:
    """Whether the kernel may hand over up to 45 consecutive packets merged into one. They are then lost
    together, which makes no difference if all or no packets are lost."""
    losses = {impairment.loss for impairment in impairments}
    return 1 in losses or losses <= {0}


class DelayServer:
    """Serves queues of the kernel, which the constructor binds.

    `serve` runs in one thread; the other methods may be called from other threads. The constructor and
    `serve` raise QueueError.
    """

    def __init__(
        self,
        impairments: Mapping[int, Sequence[Impairment]],
        uniform: Callable[[], float],
        length: int = _LENGTH,
    ) -> None:
        """`length`: packets in each queue; choose at least 1.5 × packets per second × delay."""
        self._line = DelayLine(impairments, uniform)
        self._stopping = False
        self._early = 0.0001
        self._queues = PacketQueues()
        self._wake = os.eventfd(0)
        self._sources = [self._queues.fileno(), self._wake]
        try:
            for queue, passed in impairments.items():
                self._queues.bind(queue, length, merged=_may_be_merged(passed))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """The kernel drops all held and later packets. Call this after `serve` has returned."""
        self._queues.close()
        os.close(self._wake)

    def change(self, queue: int, impairments: Sequence[Impairment]) -> None:
        """For packets that arrive from now on. Raises KeyError for a queue that is not served."""
        self._line.change(queue, impairments)
        self._queues.set_merged(queue, merged=_may_be_merged(impairments))

    def tally(self, queue: int) -> QueueTally:
        return self._line.tally(queue)

    def stop(self) -> None:
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def serve(self) -> None:
        """Hold and accept packets until `stop` is called. The calling thread gets real-time priority if
        permitted."""
        make_realtime()
        line, queues = self._line, self._queues
        readable = True
        while not self._stopping:
            if readable:
                packets, now = queues.receive(_BATCH), time.monotonic()
                queues.drop([(q, n) for q, n in packets if not line.arrive(q, n, now)])
            self._accept()
            readable = self._wait()

    def _accept(self) -> None:
        """Waking up takes a varying time, so how early the thread wakes up is adapted."""
        now, due = time.monotonic(), self._line.next_due()
        if due is not None and due <= now + self._early:
            late = min(now - due, _EARLY_MAX)
            self._early = min(max(0.0, self._early + late / 16), _EARLY_MAX)
            self._queues.accept(self._line.due(now, self._early))

    def _wait(self) -> bool:
        """Wait for a packet, or until shortly before a held one is due, to about 0.1 ms. Return whether
        a packet arrived."""
        due = self._line.next_due()
        timeout = None if due is None else max(0.0, due - self._early - time.monotonic())
        if timeout is not None and timeout > _DOZE:
            timeout -= _NAP
        return bool(select.select(self._sources, [], [], timeout)[0])
