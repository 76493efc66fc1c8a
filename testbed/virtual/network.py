"""Transfers over the links in virtual time.

Each device has one connection, and the messages of each `Direction` go one after the other. A direction
leads through pipes, of the server, of an access network, of the device; the connections that use a pipe
share it equally, and a message is through when it is through the slowest. So a message alone takes its
size over the lowest rate on its path; no pipe ever lets through more than its rate. It is not max-min
fair: the part of its share that a connection cannot use, because another pipe holds it up, goes to the
others only after it.

With `packets` a message is as in containers: it has the headers of MQTT and of its packets, and is
acknowledged on the way back, the broker and both ends take their time for it, and a device's own rate is
a token bucket: what that holds after a pause passes at once.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from agents.config import AccessLink
from agents.device.link import burst
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from testbed.plan import PlannedDevice
from testbed.plan.costs import DIGITS, HOPS, SMALL, acknowledgement_bytes, bytes_on_link, goodput
from testbed.topology import seeds
from testbed.virtual import timing
from testbed.virtual.event_queue import LINK, EventQueue

_FREE = AccessLink()
_NANOSECOND = 1e-9
"""Seconds: what has no more than that to wait in a pipe is through."""


def _of_no_interest(_: Nanoseconds) -> None:
    """When an acknowledgement has arrived."""


class Flow(Protocol):
    """What uses a pipe."""

    def through(self, pipe: Pipe) -> None:
        """It has got from `pipe` what it entered it for."""


class Pipe:
    """A rate that the flows in it share equally at each moment: processor sharing, computed exactly.

    All flows get the same, so one sum gives the progress of each: the bits that a flow has got that has
    been here since the pipe was last empty.
    """

    __slots__ = ("_check_at", "_count", "_each", "_ends", "_events", "_order", "_since", "rate")

    def __init__(self, queue: EventQueue, rate: float) -> None:
        self.rate = rate
        """bit/s, above 0. It changes only while no flow is here."""
        self._events = queue
        self._each, self._since = 0.0, 0
        self._ends: dict[Flow, tuple[float, int]] = {}
        self._order: list[tuple[float, int, Flow]] = []
        """By the end of each flow, with what has left meanwhile."""
        self._count = itertools.count()
        self._check_at: Nanoseconds | None = None
        """When the next check is planned."""

    def enter(self, flow: Flow, bits: float) -> None:
        """`flow`, which is not here, wants `bits` of this pipe from now on."""
        self._progress()
        end = self._each + bits, next(self._count)
        self._ends[flow] = end
        heapq.heappush(self._order, (*end, flow))
        self._plan()

    def leave(self, flow: Flow) -> float:
        """`flow` is not to be served any more; the bits that it has still to get."""
        self._progress()
        end, _ = self._ends.pop(flow)
        left = max(0.0, end - self._each)
        self._plan()
        return left

    def _progress(self) -> None:
        now = self._events.now
        if self._ends:
            self._each += to_seconds(now - self._since) * self.rate / len(self._ends)
        else:
            self._each = 0.0
        self._since = now

    def _remaining(self) -> float | None:
        """Seconds until the first is through, if nothing changes; None where none is here."""
        order, ends = self._order, self._ends
        while order and ends.get(order[0][2]) != order[0][:2]:
            heapq.heappop(order)
        return (order[0][0] - self._each) * len(ends) / self.rate if order else None

    def _plan(self) -> None:
        """Plan a check for when the first is through; a check that is too early does no harm."""
        remaining = self._remaining()
        if remaining is None:
            return
        at = self._events.now + from_seconds(max(0.0, remaining))
        if self._check_at is None or at < self._check_at:
            self._check_at = at
            self._events.plan(at, LINK, 0, functools.partial(self._check, at))

    def _check(self, at: Nanoseconds) -> None:
        if at != self._check_at:  # another check was planned before this one
            return
        self._check_at = None
        self._progress()
        done = []
        while (remaining := self._remaining()) is not None and remaining <= _NANOSECOND:
            flow = heapq.heappop(self._order)[2]
            del self._ends[flow]
            done.append(flow)
        self._plan()
        for flow in done:
            flow.through(self)


class Direction:
    """One direction between the server and a device: messages arrive in the order they were sent in."""

    __slots__ = (
        *("_burst", "_events", "_latency", "_open", "_own", "_rate", "_shared", "_steady"),
        *("_free", "_in", "_last", "_messages", "_packets"),
    )

    def __init__(
        self,
        queue: EventQueue,
        shared: tuple[Pipe, ...],
        latency: Callable[[], Nanoseconds],
        *,
        steady: bool,
        packets: bool,
    ) -> None:
        """`shared`: the pipes besides the device's own. `latency` gives the time that the next message
        takes beyond that in the pipes. `steady`: once its own rate is set, nothing is going
        to change. `packets`: its own rate is a token bucket."""
        self._events = queue
        self._shared = shared
        self._latency = latency
        self._steady = steady and not shared
        self._packets = packets
        self._rate: float | None = None
        self._burst: Nanoseconds = 0
        """How long its own rate takes to fill the bucket."""
        self._own: Pipe | None = None
        """With that rate, once it is needed."""
        self._open = True
        self._messages: list[tuple[float, Callable[[Nanoseconds], None]]] = []
        """Bits that are left of each message, and what happens when it is through."""
        self._in: list[Pipe] = []
        """Those that the first one is in."""
        self._last: Nanoseconds = 0
        """When the last one arrives."""
        self._free: Nanoseconds | None = None
        """When what was sent so far would be through at its own rate alone, without the bucket; None:
        nothing was."""

    def send(self, bits: float, then: Callable[[Nanoseconds], None]) -> None:
        """Once it is certain when `bits` will be there, `then` is called with that time: when they are
        through the pipes, or at once."""
        if self._steady and self._open:
            takes = from_seconds(bits / self._rate) if self._rate else 0
            self._free = self._begins() + takes
            then(self._arrival(max(self._free, self._events.now)))
            return
        self._messages.append((bits, then))
        if len(self._messages) == 1:
            self._go_on()

    def change(self, rate: float | None, *, is_open: bool) -> None:
        """The device's own pipe has `rate` (bit/s; None for no limit) from now on, for the rest of what
        is under way too. Where it is not open nothing passes until it is."""
        if (rate, is_open) == (self._rate, self._open):
            return
        if self._in:
            self._messages[0] = self._leave_pipes(), self._messages[0][1]
            self._free = self._events.now
        self._rate, self._own = rate, None
        self._burst = from_seconds(8 * burst(int(rate)) / rate) if rate and self._packets else 0
        self._open = is_open
        self._go_on()

    def drop(self) -> None:
        """What is under way is lost."""
        if self._in:
            self._leave_pipes()
            self._free = self._events.now
        self._messages.clear()
        self._last = 0

    def _leave_pipes(self) -> float:
        """Bits that are left of the first message."""
        left = max((pipe.leave(self) for pipe in self._in), default=0.0)
        self._in = []
        return left

    def through(self, pipe: Pipe) -> None:
        self._in.remove(pipe)
        if not self._in:
            self._arrive()
            self._go_on()

    def _go_on(self) -> None:
        """The first message, if there is one, begins, or goes on after a change."""
        while self._messages and self._open:
            bits = self._messages[0][0]
            pipes = dict.fromkeys(self._shared, bits) if bits else {}
            if bits and self._rate and (own := self._held(bits, self._rate)):
                self._own = self._own or Pipe(self._events, self._rate)
                pipes[self._own] = own
            self._in = list(pipes)
            for pipe, needs in pipes.items():
                pipe.enter(self, needs)
            if pipes:
                return
            self._arrive()

    def _begins(self) -> Nanoseconds:
        """When what is sent now begins at its own rate: before now, by what the bucket holds."""
        full = self._events.now - self._burst
        return full if self._free is None else max(self._free, full)

    def _held(self, bits: float, rate: float) -> float:
        """Of `bits` that are sent now, those that the bucket does not let through at once."""
        begins = self._begins()
        self._free = begins + from_seconds(bits / rate)
        return max(0.0, bits - rate * to_seconds(max(0, self._events.now - begins)))

    def _arrive(self) -> None:
        """It leaves the queue last, so that nothing else begins meanwhile."""
        self._messages[0][1](self._arrival(self._events.now))
        del self._messages[0]

    def _arrival(self, through: Nanoseconds) -> Nanoseconds:
        """When what is through at that time is there: not before what was sent before it."""
        self._last = max(self._last, through + self._latency())
        return self._last


class Line:
    """The connection between the server and one device; it outlives the device's crashes."""

    __slots__ = ("_connected", "_draws", "_generator", "_packets", "down", "link", "up")

    def __init__(
        self,
        queue: EventQueue,
        link: AccessLink,
        shared: tuple[tuple[Pipe, ...], tuple[Pipe, ...]],
        generator: Callable[[], np.random.Generator],
        *,
        steady: bool,
        packets: bool,
    ) -> None:
        """`shared`: the pipes that it shares with others, up and down. `generator` is called once, when
        something random is needed first. `steady`: nothing is ever changed, unplugged or dropped."""
        self._packets = packets
        self.link = link
        self._connected = True
        self._generator = generator
        self._draws: Callable[[], float] | None = None
        latency = self._latency
        self.up, self.down = (
            Direction(queue, pipes, latency, steady=steady, packets=packets) for pipes in shared
        )
        self._apply_link()

    def download(self, size: int, then: Callable[[Nanoseconds], None]) -> None:
        """Send `size` bytes to the device, 0 for a request of a few; once it is certain when they are
        there, `then` is called with that time."""
        self._send(self.down, self.up, size, then)

    def upload(self, size: int, then: Callable[[Nanoseconds], None]) -> None:
        """Send `size` bytes to the server, as in `download`."""
        self._send(self.up, self.down, size, then)

    def hand_in(self, size: int, then: Callable[[Nanoseconds], None]) -> None:
        """Upload an update of `size` bytes without the digits in its header."""
        self.upload(size + DIGITS if self._packets else size, then)

    def acknowledge(self) -> None:
        """The aggregator tells the device that it has its update, which there keeps it until then."""
        if self._packets:
            self.download(0, _of_no_interest)

    def _send(
        self, there: Direction, back: Direction, size: int, then: Callable[[Nanoseconds], None]
    ) -> None:
        if not self._packets:
            there.send(8 * size, then)
            return

        def through(at: Nanoseconds) -> None:
            then(at)
            back.send(8 * acknowledgement_bytes(size), _of_no_interest)

        there.send(8 * bytes_on_link(size or SMALL), through)

    def change(self, changes: Mapping[str, float | None]) -> None:
        """Set fields of `agents.config.AccessLink`, also for packets under way; a packet that has
        passed the link's queue arrives as planned."""
        self.link = self.link.with_changes(changes)
        self._apply_link()

    def plug(self, *, connected: bool) -> None:
        """Take the cable out, or put it in: meanwhile nothing passes, and what is under way waits."""
        self._connected = connected
        self._apply_link()

    def drop(self) -> None:
        """What is under way is lost, both ways."""
        self.up.drop()
        self.down.drop()

    def _apply_link(self) -> None:
        link = self.link
        is_open = self._connected and not link.is_outage
        for direction, rate in ((self.up, link.up), (self.down, link.down)):
            direction.change(goodput(rate, link.rtt, link.loss), is_open=is_open)

    def _latency(self) -> Nanoseconds:
        """In one direction, drawn anew where jitter or loss make it random."""
        link = self.link
        hops = HOPS if self._packets else 0.0
        if not (link.jitter or link.loss):
            return from_seconds(hops + link.rtt / 2)
        if self._draws is None:
            self._draws = self._generator().random
        return from_seconds(hops + timing.latency(link.rtt, link.jitter, link.loss, self._draws))


class Network:
    """All links of a run."""

    def __init__(
        self,
        queue: EventQueue,
        seed: int,
        server_link: AccessLink | None = None,
        *,
        steady: bool = False,
        packets: bool = False,
    ) -> None:
        """`seed`: the run's. `steady`: no link changes, and no device is cut off or crashes. `packets`:
        as emulated links have them."""
        self._steady = steady
        self._packets = packets
        self._events = queue
        self._seed = seed
        link = server_link or _FREE
        self._server = self._pipes(link.down), self._pipes(link.up)  # what comes up is its download
        self._cells: dict[str, tuple[tuple[Pipe, ...], tuple[Pipe, ...]]] = {}

    def line(self, device: PlannedDevice) -> Line:
        """A new device's line."""
        up, down = self._server
        if (access := device.access) is not None:
            if access.name not in self._cells:
                self._cells[access.name] = self._pipes(access.up), self._pipes(access.down)
            cell_up, cell_down = self._cells[access.name]
            up, down = up + cell_up, down + cell_down
        generator = functools.partial(seeds.generator, self._seed, device.name, "link")
        link, steady = device.link or _FREE, self._steady
        return Line(self._events, link, (up, down), generator, steady=steady, packets=self._packets)

    def _pipes(self, rate: int | None) -> tuple[Pipe, ...]:
        return () if rate is None else (Pipe(self._events, rate),)
