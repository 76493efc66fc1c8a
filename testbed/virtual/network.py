"""Transfers over links in virtual time.

Each device has one connection. In each `Direction`, the connection carries one message after the other.
A message passes up to three pipes: that of the server, that of a shared access link, and that of the
device. The connections in a pipe share its rate equally. A message has passed when it has passed all its
pipes. If a message shares no pipe, the duration of its transfer is its size divided by the lowest rate
on its path. No pipe carries more than its rate.

The sharing is not max-min fair. If a connection cannot use its share of a pipe, because another pipe is
slower, the other connections get the rest only after that connection has left the pipe.

With `packets`, messages are as in containers. They have the headers of MQTT and of their packets, are
acknowledged on the way back, and need time at the broker and at both ends. A device's own rate is a
token bucket: after a pause, as many bits as the bucket contains pass without delay.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from agents.config import AccessLink, DrawnDuration
from agents.device.link import burst
from agents.timing import durations
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from testbed.plan import PlannedDevice
from testbed.plan.costs import DIGITS, HOPS, SMALL, acknowledgement_bytes, bytes_on_link, goodput
from testbed.plan.planned_devices import PlannedTransfers
from testbed.topology import seeds
from testbed.virtual import timing
from testbed.virtual.event_queue import LINK, EventQueue

_FREE = AccessLink()
_HEADER, _SAME_SIZE = 512, 0.05
"""Bytes, and share of the size, by which messages of the same content may differ: numbers in headers
have more or fewer digits."""
_NANOSECOND = 1e-9
"""One nanosecond, in seconds. When a flow needs at most this time to pass a pipe, it counts as
passed."""


def _ignore(_: Nanoseconds) -> None:
    """Ignore the arrival of an acknowledgement."""


class Flow(Protocol):
    """A transfer through a shared pipe."""

    def on_done(self, pipe: SharedPipe) -> None:
        """Called when the flow has passed `pipe`."""


class SharedPipe:
    """A rate that is shared equally by its flows at each moment (processor sharing), computed exactly.

    All flows progress equally. Therefore one sum is enough: the number of bits that one flow would have
    sent since the pipe was last empty.
    """

    __slots__ = ("_check_at", "_count", "_each", "_ends", "_events", "_order", "_since", "rate")

    def __init__(self, queue: EventQueue, rate: float) -> None:
        self.rate = rate
        """Rate in bit/s, above 0. It changes only while the pipe is empty."""
        self._events = queue
        self._each, self._since = 0.0, 0
        self._ends: dict[Flow, tuple[float, int]] = {}
        self._order: list[tuple[float, int, Flow]] = []
        """Heap of (end, number, flow). `end` is the value of `_each` at which the flow has passed. Flows
        that have left may still be in the heap."""
        self._count = itertools.count()
        self._check_at: Nanoseconds | None = None
        """Time of the next planned check, in nanoseconds; None if no check is planned."""

    def enter(self, flow: Flow, bits: float) -> None:
        """Add `flow`, which has `bits` bits to send. The flow must not be in the pipe yet."""
        self._progress()
        end = self._each + bits, next(self._count)
        self._ends[flow] = end
        heapq.heappush(self._order, (*end, flow))
        self._plan()

    def leave(self, flow: Flow) -> float:
        """Remove `flow` before it has passed; return the number of bits that it has not sent yet."""
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
        """Return the seconds until the first flow has passed if nothing changes until then; None if the
        pipe is empty."""
        order, ends = self._order, self._ends
        while order and ends.get(order[0][2]) != order[0][:2]:
            heapq.heappop(order)
        return (order[0][0] - self._each) * len(ends) / self.rate if order else None

    def _plan(self) -> None:
        """Plan a check for the time at which the first flow will have passed. A check that comes too
        early does no harm."""
        remaining = self._remaining()
        if remaining is None:
            return
        at = self._events.now + from_seconds(max(0.0, remaining))
        if self._check_at is None or at < self._check_at:
            self._check_at = at
            self._events.plan(at, LINK, 0, functools.partial(self._check, at))

    def _check(self, at: Nanoseconds) -> None:
        if at != self._check_at:  # an earlier check was planned in its place
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
            flow.on_done(self)


class Direction:
    """One direction between the server and a device. Messages arrive in the order of sending."""

    __slots__ = (
        *("_burst", "_events", "_latency", "_open", "_own", "_rate", "_shared", "_steady"),
        *("_free", "_in", "_last", "_messages", "_packets"),
    )

    def __init__(
        self,
        queue: EventQueue,
        shared: tuple[SharedPipe, ...],
        latency: Callable[[], Nanoseconds],
        *,
        steady: bool,
        packets: bool,
    ) -> None:
        """`shared`: pipes to pass in addition to the device's own pipe. `latency`: returns the delay of
        the next message after it has passed the pipes. `steady`: promises that nothing changes after the
        device's rate is set. `packets`: whether the device's rate is a token bucket."""
        self._events = queue
        self._shared = shared
        self._latency = latency
        self._steady = steady and not shared
        self._packets = packets
        self._rate: float | None = None
        self._burst: Nanoseconds = 0
        """Nanoseconds in which the device's rate fills the empty bucket; 0 if there is no bucket."""
        self._own: SharedPipe | None = None
        """The device's own pipe; None until it is needed."""
        self._open = True
        self._messages: list[tuple[float, Callable[[Nanoseconds], None]]] = []
        """Messages that have not passed the pipes yet: the remaining bits of each, and the callback for
        its arrival time."""
        self._in: list[SharedPipe] = []
        """Pipes that the first message has not passed yet."""
        self._last: Nanoseconds = 0
        """Arrival time of the last message that has passed, in nanoseconds."""
        self._free: Nanoseconds | None = None
        """Time in nanoseconds at which all messages so far would have passed at the device's own rate
        without the bucket; None if no message was sent."""

    def send(self, bits: float, then: Callable[[Nanoseconds], None]) -> None:
        """Send a message of `bits` bits. Call `then` with the message's arrival time as soon as this
        time is certain: either at once, or when the message has passed the pipes."""
        if self._steady and self._open:
            takes = from_seconds(bits / self._rate) if self._rate else 0
            self._free = self._send_start() + takes
            then(self._arrival(max(self._free, self._events.now)))
            return
        self._messages.append((bits, then))
        if len(self._messages) == 1:
            self._start_first()

    def change(self, rate: float | None, *, is_open: bool) -> None:
        """Change the rate of the device's own pipe. The new rate also applies to the rest of messages in
        flight. `rate` is in bit/s; None if it is unlimited. While `is_open` is false, nothing passes."""
        if (rate, is_open) == (self._rate, self._open):
            return
        if self._in:
            self._messages[0] = self._leave_pipes(), self._messages[0][1]
            self._free = self._events.now
        self._rate, self._own = rate, None
        self._burst = from_seconds(8 * burst(int(rate)) / rate) if rate and self._packets else 0
        self._open = is_open
        self._start_first()

    def drop(self) -> None:
        """Discard all messages that have not passed the pipes yet."""
        if self._in:
            self._leave_pipes()
            self._free = self._events.now
        self._messages.clear()
        self._last = 0

    def _leave_pipes(self) -> float:
        """Take the first message out of its pipes; return its remaining bits."""
        left = max((pipe.leave(self) for pipe in self._in), default=0.0)
        self._in = []
        return left

    def on_done(self, pipe: SharedPipe) -> None:
        self._in.remove(pipe)
        if not self._in:
            self._arrive()
            self._start_first()

    def _start_first(self) -> None:
        """Start the first message, or continue it after a change. A message that has no pipe to pass
        gets its arrival time at once. Nothing happens while the direction is closed."""
        while self._messages and self._open:
            bits = self._messages[0][0]
            pipes = dict.fromkeys(self._shared, bits) if bits else {}
            if bits and self._rate and (own := self._bits_beyond_bucket(bits, self._rate)):
                self._own = self._own or SharedPipe(self._events, self._rate)
                pipes[self._own] = own
            self._in = list(pipes)
            for pipe, needs in pipes.items():
                pipe.enter(self, needs)
            if pipes:
                return
            self._arrive()

    def _send_start(self) -> Nanoseconds:
        """Return the time at which a message sent now would have to start to arrive at the same time
        without the bucket. If the bucket is full, this is the present time minus the time that filling
        it took."""
        full = self._events.now - self._burst
        return full if self._free is None else max(self._free, full)

    def _bits_beyond_bucket(self, bits: float, rate: float) -> float:
        """Take `bits` bits out of the bucket now. Return how many of these bits cannot pass at once."""
        begins = self._send_start()
        self._free = begins + from_seconds(bits / rate)
        return max(0.0, bits - rate * to_seconds(max(0, self._events.now - begins)))

    def _arrive(self) -> None:
        """Report the arrival of the first message, then remove the message. The order matters: while the
        message is there, the callback cannot start another one."""
        self._messages[0][1](self._arrival(self._events.now))
        del self._messages[0]

    def _arrival(self, passed: Nanoseconds) -> Nanoseconds:
        """Return the arrival time of a message that has passed its pipes at `passed`. No message arrives
        before an earlier one."""
        self._last = max(self._last, passed + self._latency())
        return self._last


class Line:
    """Connection between the server and a device. The connection stays the same if the device
    restarts."""

    __slots__ = ("_connected", "_draws", "_generator", "_packets", "down", "link", "up")

    def __init__(
        self,
        queue: EventQueue,
        link: AccessLink,
        shared: tuple[tuple[SharedPipe, ...], tuple[SharedPipe, ...]],
        generator: Callable[[], np.random.Generator],
        *,
        steady: bool,
        packets: bool,
    ) -> None:
        """`shared`: pipes shared with other devices, for the directions up and down. `generator`: called
        once, when a random number is first needed. `steady`: promises that the link never changes, is
        never disconnected, and never drops messages."""
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
        """Send `size` bytes to the device; size 0 stands for a small request. Call `then` with the
        arrival time as soon as that time is certain."""
        self._send(self.down, self.up, size, then)

    def upload(self, size: int, then: Callable[[Nanoseconds], None]) -> None:
        """Send `size` bytes to the server. Call `then` with the arrival time as soon as that time is
        certain."""
        self._send(self.up, self.down, size, then)

    def bytes_of(self, size: int) -> tuple[int, int]:
        """Return the bytes on the link of a message of `size` bytes: in its direction, and of its
        acknowledgements in the other direction."""
        if not self._packets:
            return size, 0
        return bytes_on_link(size or SMALL), acknowledgement_bytes(size)

    def update_size(self, size: int) -> int:
        """Return the size of the message with an update of `size` bytes. With `packets`, the digits of
        the numbers in the update's header are added."""
        return size + DIGITS if self._packets else size

    def hand_in(self, size: int, then: Callable[[Nanoseconds], None]) -> None:
        """Upload an update of `size` bytes, as `update_size` changes it."""
        self.upload(self.update_size(size), then)

    def acknowledge(self) -> None:
        """Send the aggregator's acknowledgement of an update to the device."""
        if self._packets:
            self.download(0, _ignore)

    def _send(
        self, there: Direction, back: Direction, size: int, then: Callable[[Nanoseconds], None]
    ) -> None:
        if not self._packets:
            there.send(8 * size, then)
            return

        def arrives(at: Nanoseconds) -> None:
            then(at)
            back.send(8 * acknowledgement_bytes(size), _ignore)

        there.send(8 * bytes_on_link(size or SMALL), arrives)

    def change(self, changes: Mapping[str, float | None]) -> None:
        """Change fields of `agents.config.AccessLink`. The change also applies to messages in flight. If
        a message has already passed its pipes, it arrives as planned."""
        self.link = self.link.with_changes(changes)
        self._apply_link()

    def plug(self, *, connected: bool) -> None:
        """Connect or disconnect the link. While it is disconnected, messages in flight wait."""
        self._connected = connected
        self._apply_link()

    def drop(self) -> None:
        """Discard all messages in flight in both directions."""
        self.up.drop()
        self.down.drop()

    def _apply_link(self) -> None:
        link = self.link
        is_open = self._connected and not link.is_outage
        for direction, rate in ((self.up, link.up), (self.down, link.down)):
            direction.change(goodput(rate, link.rtt, link.loss), is_open=is_open)

    def _latency(self) -> Nanoseconds:
        """Return the delay of the next message in one direction. The delay is random if the link has
        jitter or loss."""
        link = self.link
        hops = HOPS if self._packets else 0.0
        if not (link.jitter or link.loss):
            return from_seconds(hops + link.rtt / 2)
        if self._draws is None:
            self._draws = self._generator().random
        return from_seconds(hops + timing.latency(link.rtt, link.jitter, link.loss, self._draws))


class TimedLine(Line):
    """Connection whose transfers have given durations, such as those of a recorded run. Requests and
    acknowledgements take no time. Each transfer begins when it is ordered, and none arrives before an
    earlier one in its direction."""

    __slots__ = ("_lasting", "_latest")

    def __init__(
        self,
        queue: EventQueue,
        transfers: PlannedTransfers,
        generator: Callable[[], np.random.Generator],
    ) -> None:
        super().__init__(queue, _FREE, ((), ()), generator, steady=False, packets=False)
        rng = generator()
        self._lasting = {
            self.up: _durations(transfers.upload, transfers.update_bytes, rng),
            self.down: _durations(transfers.download, transfers.model_bytes, rng),
        }
        self._latest = dict.fromkeys((self.up, self.down), 0)

    def _send(
        self, there: Direction, back: Direction, size: int, then: Callable[[Nanoseconds], None]
    ) -> None:
        takes = self._lasting[there](size) if size else 0

        def passed(at: Nanoseconds) -> None:
            self._latest[there] = max(self._latest[there], at + takes)
            then(self._latest[there])

        there.send(0, passed)

    def drop(self) -> None:
        super().drop()
        self._latest = dict.fromkeys((self.up, self.down), 0)


def _durations(
    duration: DrawnDuration | None, usual: int | None, rng: np.random.Generator
) -> Callable[[int], Nanoseconds]:
    """Return a function from the size of a message in bytes to the duration of its transfer. `usual`:
    size in bytes that `duration` refers to; None if the size has no influence."""
    if duration is None:
        return lambda _: 0
    draw = durations.sampler(duration, rng)

    def takes(size: int) -> Nanoseconds:
        near = usual is None or abs(size - usual) <= max(_HEADER, _SAME_SIZE * usual)
        return from_seconds(draw() * (1.0 if usual is None or near else size / usual))

    return takes


class VirtualNetwork:
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
        """`seed`: the run's seed. `steady`: promises that no link changes, and that no device is cut off
        or crashes. `packets`: whether transfers consist of packets, as on emulated links."""
        self._steady = steady
        self._packets = packets
        self._events = queue
        self._seed = seed
        link = server_link or _FREE
        self._server = self._pipes(link.down), self._pipes(link.up)  # the server downloads uploads
        self._accesses: dict[str, tuple[tuple[SharedPipe, ...], tuple[SharedPipe, ...]]] = {}

    def line(self, device: PlannedDevice) -> Line:
        """Make the line of a device."""
        up, down = self._server
        for segment in device.path:
            if segment.name not in self._accesses:
                self._accesses[segment.name] = self._pipes(segment.up), self._pipes(segment.down)
            access_up, access_down = self._accesses[segment.name]
            up, down = up + access_up, down + access_down
        generator = functools.partial(seeds.generator, self._seed, device.name, "link")
        if device.transfers is not None:
            return TimedLine(self._events, device.transfers, generator)
        link, steady = device.link or _FREE, self._steady
        return Line(self._events, link, (up, down), generator, steady=steady, packets=self._packets)

    def _pipes(self, rate: int | None) -> tuple[SharedPipe, ...]:
        return () if rate is None else (SharedPipe(self._events, rate),)
