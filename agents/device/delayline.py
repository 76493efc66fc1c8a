"""A delay line in userspace: delay, jitter and loss of a link on kernels without sch_netem, and of the
segments that devices share. (`agents.device.link` shapes a device's own rate.)

It works on the receiving side: an iptables rule sends received packets to an NFQUEUE, where the kernel
holds each until it is due. On the sending side, TCP would slow down, because it counts packets that its
own host holds.

Fail closed: the rules have no --queue-bypass. So the kernel drops all packets of a queue while no delay
line serves it: before it starts, and after it ends for any reason.

A delay line should have its own process, without CPU quota and with CAP_SYS_NICE. Otherwise it is late
when it is throttled, waits for a core, or waits for a thread that holds Python's lock.
"""

from __future__ import annotations

import heapq
import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agents.device.nfqueue import PacketQueues
from agents.timing.realtime import make_realtime

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
