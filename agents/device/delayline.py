"""Delay, jitter and loss of a link by a delay line in userspace, for kernels without sch_netem; and the
rate that several devices share, as in a Wi-Fi cell.

It stands on the receiving side: an iptables rule sends what was received to an NFQUEUE, where
the kernel holds each packet until it is due. (On the sending side TCP, which counts what its own host
still holds, would slow down.) A device's own rate is the business of `agents.device.link`.

Fail closed: the rules have no --queue-bypass, so while no delay line serves a queue, before it starts
or after it died, however it died, the kernel drops all that the queue is sent.

A delay line needs a process of its own, outside any CPU quota, and best CAP_SYS_NICE: throttled, waiting
for a core or beside a thread that holds Python's lock, it would be late.
"""

from __future__ import annotations

import heapq
import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from agents.device.nfqueue import PacketQueues
from agents.timing.realtime import make_realtime

_LENGTH = 65536
"""Packets a queue holds: 0.5 s at 1 Gbit/s need 42,000 of full size."""
_BATCH = 64
"""Packets received at once; small, so that what falls due meanwhile waits well under 1 ms."""
_DOZE, _NAP = 0.010, 0.005
"""Seconds. The kernel may end a sleep 0.1 to 0.5 % late: one above _DOZE is set to end _NAP early."""

_EARLY_MAX = 0.0005
"""Seconds by which a packet may be accepted early so that the mean is right."""
_FRAME = 14
"""Bytes of the Ethernet header, which a rate counts and IP does not."""
_WAITING, _PACKETS = 0.2, 12 * 1514
"""Seconds at a shared rate, or bytes if that is more, that wait in its queue; what is beyond is lost."""


@dataclass(frozen=True, slots=True)
class Impairment:
    """What befalls the packets of one direction; loss 1 is an outage. Raises ValueError."""

    delay: float = 0.0
    """Seconds, one way."""
    jitter: float = 0.0
    """Seconds. The delay is uniform in delay ± jitter, but never negative."""
    loss: float = 0.0
    """Fraction of packets dropped, independently, 0 to 1."""

    def __post_init__(self) -> None:
        for name in ("delay", "jitter"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name):g} s, expected at least 0 s")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss is {self.loss:g}, expected 0 to 1")


@dataclass(slots=True)
class Tally:
    """What became of a queue's packets; times in seconds, sums and maximum over the accepted ones."""

    arrived: int = 0
    dropped: int = 0
    accepted: int = 0
    held_total: float = 0.0
    late_total: float = 0.0
    late_max: float = 0.0
    """Late is what is accepted after its due time; early counts as negative in the sum."""


@dataclass(slots=True)
class Cell:
    """One direction of a link that devices share: packets pass one after the other, as they came."""

    rate: float
    """bit/s on the wire."""
    free: float = 0.0
    """When the last packet is through."""

    def through(self, now: float, size: int) -> float | None:
        """When a packet of `size` bytes (of IP) is through; None where the queue is full."""
        waits = self.free - now
        if waits > max(_WAITING, 8 * _PACKETS / self.rate):
            return None
        self.free = max(now, self.free) + 8 * (size + _FRAME) / self.rate
        return self.free


@dataclass(slots=True)
class _Lane:
    impairment: Impairment
    cell: Cell | None = None
    held: deque[tuple[float, float, int]] = field(default_factory=deque)
    """(due, arrival, packet), oldest first; due times never fall."""
    tally: Tally = field(default_factory=Tally)


class DelayLine:
    """Which packets to drop and when to accept the others: pure, one lane per queue.

    Packets of a queue never overtake each other: one that would, because its jitter is smaller or
    the delay was cut, is due with the one before it. `uniform` gives random numbers in [0, 1). Times are
    seconds of any clock that never goes back. `cells` has the queues whose rate is shared.
    """

    def __init__(
        self,
        impairments: Mapping[int, Impairment],
        uniform: Callable[[], float],
        cells: Mapping[int, Cell] = MappingProxyType({}),
    ) -> None:
        self._lanes = {
            queue: _Lane(impairment, cells.get(queue)) for queue, impairment in impairments.items()
        }
        self._uniform = uniform
        self._heads: list[tuple[float, int]] = []  # heap of (due time of its oldest packet, queue)

    def change(self, queue: int, impairment: Impairment) -> None:
        """For what arrives from now on; packets held keep their due time. Safe from any thread."""
        self._lanes[queue].impairment = impairment

    def arrive(self, queue: int, packet: int, now: float, size: int = 0) -> bool:
        """Take in `packet` of `size` bytes; False: drop it now."""
        lane = self._lanes[queue]
        lane.tally.arrived += 1
        impairment = lane.impairment  # read once: another thread may change it
        passed: float | None = None
        if not impairment.loss or self._uniform() >= impairment.loss:
            passed = now if lane.cell is None else lane.cell.through(now, size)
        if passed is None:
            lane.tally.dropped += 1
            return False
        delay = impairment.delay
        if impairment.jitter:
            delay = max(0.0, delay + impairment.jitter * (2 * self._uniform() - 1))
        due = passed + delay
        if lane.held:
            due = max(due, lane.held[-1][0])
        else:
            heapq.heappush(self._heads, (due, queue))
        lane.held.append((due, now, packet))
        return True

    def next_due(self) -> float | None:
        """When `due` has something to accept; None while nothing is held."""
        return self._heads[0][0] if self._heads else None

    def due(self, now: float, early: float = 0.0) -> list[tuple[int, int]]:
        """(queue, packet), at most one per queue: accept the packet and all before it of its queue.

        What falls due within `early` seconds is counted in.
        """
        accepted = []
        heads = self._heads
        while heads and heads[0][0] <= now + early:
            queue = heads[0][1]
            lane = self._lanes[queue]
            accepted.append((queue, _release(lane, now, early)))
            if lane.held:
                heapq.heapreplace(heads, (lane.held[0][0], queue))
            else:
                heapq.heappop(heads)
        return accepted

    def tally(self, queue: int) -> Tally:
        """Of `queue` since the start; goes on counting."""
        return self._lanes[queue].tally


def _release(lane: _Lane, now: float, early: float) -> int:
    """Let go of what is due by `now + early`, which is at least one packet; the last of them."""
    held, tally = lane.held, lane.tally
    last = held[0][2]
    tally.late_max = max(tally.late_max, now - held[0][0])  # the oldest is the latest
    while held and held[0][0] <= now + early:
        due, arrival, last = held.popleft()
        tally.accepted += 1
        tally.held_total += now - arrival
        tally.late_total += now - due
    return last


class DelayServer:
    """A delay line between the kernel's queues and the clock; bound once constructed.

    `serve` runs in one thread; every other method may be called from another one. The constructor and
    `serve` raise QueueError.
    """

    def __init__(
        self,
        impairments: Mapping[int, Impairment],
        uniform: Callable[[], float],
        cells: Mapping[int, Cell] = MappingProxyType({}),
        length: int = _LENGTH,
    ) -> None:
        """`length`: packets that each queue may hold, at least 1.5 × rate × delay."""
        self._line = DelayLine(impairments, uniform, cells)
        self._sized = frozenset(cells)
        self._stopping = False
        self._early = 0.0001
        self._queues = PacketQueues()
        self._wake = os.eventfd(0)
        self._sources = [self._queues.fileno(), self._wake]
        try:
            for queue, impairment in impairments.items():
                whole = self._whole(queue, impairment)
                self._queues.bind(queue, length, whole=whole, sized=queue in cells)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the kernel drop what is held, and all that follows. After `serve` has returned."""
        self._queues.close()
        os.close(self._wake)

    def change(self, queue: int, impairment: Impairment) -> None:
        """For what arrives from now on. KeyError for a queue that is not served."""
        self._line.change(queue, impairment)
        self._queues.keep_whole(queue, whole=self._whole(queue, impairment))

    def _whole(self, queue: int, impairment: Impairment) -> bool:
        """Whether merged packets may count as one: it would be lost, or fill a shared link, as up to 45
        of the wire in a row. Where all or none are lost, that makes no difference."""
        return impairment.loss in (0, 1) and queue not in self._sized

    def tally(self, queue: int) -> Tally:
        """What became of the packets of `queue` that got here."""
        return self._line.tally(queue)

    def stop(self) -> None:
        """Make `serve` return."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def serve(self) -> None:
        """Hold and accept packets until `stop`; the calling thread becomes a real-time one if it may."""
        make_realtime()
        line, queues = self._line, self._queues
        readable = True
        while not self._stopping:
            if readable:
                packets, now = queues.receive(_BATCH), time.monotonic()
                queues.drop([(q, n) for q, n, size in packets if not line.arrive(q, n, now, size)])
            self._accept()
            readable = self._wait()

    def _accept(self) -> None:
        """What is due. To wake takes a while, which varies: we learn by how much to be early."""
        now, due = time.monotonic(), self._line.next_due()
        if due is not None and due <= now + self._early:
            late = min(now - due, _EARLY_MAX)
            self._early = min(max(0.0, self._early + late / 16), _EARLY_MAX)
            self._queues.accept(self._line.due(now, self._early))

    def _wait(self) -> bool:
        """Until a packet comes (True) or one falls due, or a while less; precise to about 0.1 ms."""
        due = self._line.next_due()
        timeout = None if due is None else max(0.0, due - self._early - time.monotonic())
        if timeout is not None and timeout > _DOZE:
            timeout -= _NAP
        return bool(select.select(self._sources, [], [], timeout)[0])
