"""The segments that devices share, in the relay. `SegmentScheduler` uses neither I/O nor a clock: the
time is an argument. `SharedSegments` runs one scheduler per direction in the relay's event loop.

As in the kernel's HTB (`agents.router.segments`), each device has a queue of its own, and each segment a
token bucket. Among the queues whose segments all have tokens, the one that has sent least goes first, so
rates are max-min fair over the devices. Then an item is in flight for the segments' delays. Background
traffic takes its part of the rates, but its bytes go nowhere.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from agents.config import WAYS, Segment, Way, path_of
from agents.device.link import burst, queue_bytes
from agents.links import background
from agents.links.background import RateSchedule, TransferSchedule, schedule
from agents.links.max_min import SegmentProbe, is_enough, nearest, probes
from agents.mqtt.topics import ROUTER
from agents.wire.messages import NetworkProbe, NetworkUse, SegmentFigures, SegmentUse
from testbed.relay.sockets import MAX_PIECE_BYTES, SEGMENT, deliver_due, largest_piece, on_wire

Item = Callable[[], None]
"""Called when its bytes have passed the segments."""
_PACKET = on_wire(SEGMENT)
_MEASURED_PIECES, _MIN_PIECE, _READ_SECONDS = 8, 64, 0.002
"""Minimum number of pieces in a measurement, their minimum payload in bytes, and seconds between two
readings."""


@dataclass(slots=True)
class _Queue:
    name: str
    """Device; empty for background traffic."""
    path: tuple[str, ...]
    """Segments from the queue's own one to the root."""
    is_first: bool = False
    """Whether items go before those of other queues."""
    items: deque[tuple[Item | None, int, float]] = field(default_factory=deque)
    """Items with their bytes on the wire, and the times at which they entered the queue."""
    waiting: int = 0
    """Bytes on the wire."""
    sent: float = 0.0
    """Bytes on the wire. A queue that was empty catches up with the others, so that it gains nothing
    from a pause."""
    last_due: float = -math.inf
    """Time at which the last item is due behind the segments."""


class SegmentScheduler:
    """Shares one direction of a tree of segments. Times are seconds of a monotonic clock."""

    def __init__(
        self,
        segments: Sequence[Segment],
        attached: Mapping[str, str],
        way: Way,
        uniform: Callable[[], float],
    ) -> None:
        """`attached`: segment of each device. `uniform` returns random numbers in [0, 1)."""
        self.segments = {segment.name: segment for segment in segments}
        self._way: Way = way
        self._uniform = uniform
        self._queues = {device: _Queue(device, self._names(name)) for device, name in attached.items()}
        self._backlogged: dict[int, _Queue] = {}
        self._empty_at = dict.fromkeys(self.segments, -math.inf)
        """Time in seconds at which each segment's bucket is empty. It then fills at the segment's
        rate, up to its depth. The next item is chosen at this time. It has passed as soon as the bucket
        holds its size."""
        self._cut: set[str] = set()
        self._under_way: list[tuple[float, int, Item]] = []
        self._numbers = itertools.count()
        self._turn = 0.0
        """`sent` of the queue that has sent last."""
        self.passed: dict[str, Counter[str]] = {name: Counter() for name in self.segments}
        """Bytes on the wire that passed each segment, by device; background traffic by the empty
        name."""

    def _names(self, segment: str) -> tuple[str, ...]:
        return tuple(one.name for one in path_of(segment, self.segments))

    def _path(self, queue: _Queue) -> Iterator[Segment]:
        return (self.segments[name] for name in queue.path)

    def _is_cut(self, queue: _Queue) -> bool:
        return not self._cut.isdisjoint(queue.path)

    def rate(self, device: str) -> int | None:
        """Lowest rate on the way in bit/s; None if unlimited."""
        return self._rate(self._queues[device])

    def _rate(self, queue: _Queue) -> int | None:
        rates = (one.rate(self._way) for one in self._path(queue))
        return min((rate for rate in rates if rate is not None), default=None)

    def is_full(self, device: str) -> bool:
        """True also while the device's segment is cut."""
        queue = self._queues[device]
        return self._is_cut(queue) or queue.waiting >= self._limit(queue)

    def _limit(self, queue: _Queue) -> int:
        limits = [
            (rate, one.queue or queue_bytes(rate))
            for one in self._path(queue)
            if (rate := one.rate(self._way)) is not None
        ]
        return min(limits)[1] if limits else 64 * MAX_PIECE_BYTES

    def put(self, device: str, item: Item, size: int, now: float) -> None:
        """`size`: bytes of payload."""
        self._put(self._queues[device], item, on_wire(size), now)

    def put_unshaped(self, device: str, item: Item, now: float) -> None:
        """No rate holds the item up, only the segments' delays."""
        queue = self._queues[device]
        self._send_on(queue, item, now + sum(self._delay(one) for one in self._path(queue)))

    def _put(self, queue: _Queue, item: Item | None, wire: int, now: float) -> None:
        self.advance(now)
        if not queue.items:
            queue.sent = max(queue.sent, self._turn)
            self._backlogged[id(queue)] = queue
        queue.items.append((item, wire, now))
        queue.waiting += wire

    def stream(self, segment: str) -> _Queue:
        return _Queue("", self._names(segment), is_first=True)

    def offer(self, queue: _Queue, wire: int, now: float) -> None:
        """Add `wire` bytes of background traffic of a given rate, which are lost if the queue is full or
        the segment is cut."""
        if not (self._is_cut(queue) or queue.waiting >= self._limit(queue)):
            self._put(queue, None, wire, now)

    def begin_transfer(self, segment: str, size: int, now: float) -> None:
        """Add a background transfer of `size` bytes of payload."""
        self._put(_Queue("", self._names(segment)), None, on_wire(size), now)

    def drop_background(self, segment: str) -> None:
        for queue in [*self._backlogged.values()]:
            if not queue.name and queue.path[0] == segment:
                queue.items.clear()
                queue.waiting = 0
                del self._backlogged[id(queue)]

    def add_sender(self, device: str) -> str:
        """Add a queue beside the device's, for a measurement; return its name."""
        name = f"{device} measured"
        self._queues[name] = _Queue(device, self._queues[device].path)
        return name

    def remove_sender(self, name: str) -> None:
        """Items that wait in it are dropped."""
        self._backlogged.pop(id(self._queues.pop(name)), None)

    def advance(self, now: float) -> None:
        while True:
            ready = [(self._pass_time(queue), queue) for queue in self._backlogged.values()]
            first = min((at for at, _ in ready), default=math.inf)
            if first > now:
                return
            candidates = (queue for at, queue in ready if at <= first)
            self._pass(min(candidates, key=lambda one: (not one.is_first, one.sent)), first)

    def _pass_time(self, queue: _Queue) -> float:
        if self._is_cut(queue):
            return math.inf
        return max(queue.items[0][2], *(self._empty_at[name] for name in queue.path))

    def _pass(self, queue: _Queue, at: float) -> None:
        item, wire, since = queue.items.popleft()
        if item is None and wire > _PACKET and not queue.is_first:  # packet by packet, as devices
            queue.items.appendleft((None, wire - _PACKET, since))
            wire = _PACKET
        queue.waiting -= wire
        if not queue.items:
            del self._backlogged[id(queue)]
        queue.sent += wire
        if not queue.is_first:
            self._turn = queue.sent
        passed, delay = at, 0.0
        for segment in self._path(queue):
            self.passed[segment.name][queue.name] += wire
            if (rate := segment.rate(self._way)) is not None:
                saved = at - 8 * max(burst(rate), wire) / rate
                self._empty_at[segment.name] = max(self._empty_at[segment.name], saved) + 8 * wire / rate
                passed = max(passed, self._empty_at[segment.name])
            delay += self._delay(segment)
        if item is not None:
            self._send_on(queue, item, passed + delay)

    def _delay(self, segment: Segment) -> float:
        return max(0.0, segment.rtt / 2 + segment.jitter * (2 * self._uniform() - 1))

    def _send_on(self, queue: _Queue, item: Item, due: float) -> None:
        """Deliver at `due`, but not before an earlier item of the queue."""
        queue.last_due = max(queue.last_due, due)
        heapq.heappush(self._under_way, (queue.last_due, next(self._numbers), item))

    def change(self, segment: Segment, now: float) -> None:
        self.advance(now)
        name, before = segment.name, self.segments[segment.name].rate(self._way)
        self.segments[name] = segment
        if (rate := segment.rate(self._way)) is not None:
            held = float(burst(rate))
            if before is not None:  # what is missing in the bucket comes at the new rate
                held = min(held, (now - self._empty_at[name]) * before / 8)
            self._empty_at[name] = now - 8 * held / rate

    def cut(self, segment: str, now: float) -> None:
        """Items in flight arrive."""
        self.advance(now)
        self._cut.add(segment)

    def restore(self, segment: str, now: float) -> None:
        self.advance(now)
        self._cut.discard(segment)
        for name in self._empty_at:
            self._empty_at[name] = max(self._empty_at[name], now)

    def pop_due(self, now: float) -> list[Item]:
        self.advance(now)
        found = []
        while self._under_way and self._under_way[0][0] <= now:
            found.append(heapq.heappop(self._under_way)[2])
        return found

    def next_due(self) -> float | None:
        times = [self._pass_time(queue) for queue in self._backlogged.values()]
        if self._under_way:
            times.append(self._under_way[0][0])
        first = min(times, default=math.inf)
        return None if first == math.inf else first


class SegmentLane:
    """A device's way through its segments in one direction; see `testbed.relay.sockets.LinkLane`."""

    def __init__(self, shared: _SegmentLoop, device: str) -> None:
        self._shared = shared
        self._device = device

    @property
    def rate(self) -> int | None:
        """Lowest rate on the way in bit/s; None if unlimited."""
        return self._shared.scheduler.rate(self._device)

    @property
    def piece(self) -> int:
        """Maximum payload of an item, in bytes."""
        return largest_piece(self.rate)

    @property
    def is_full(self) -> bool:
        """True also while a segment is cut."""
        return self._shared.scheduler.is_full(self._device)

    def put(self, item: Item, size: int, now: float) -> None:
        """`size`: bytes of payload."""
        self._shared.scheduler.put(self._device, item, size, now)

    def advance(self) -> None:
        self._shared.advance()

    async def wait_for_room(self) -> None:
        """Wait until something has changed; the caller has to check again."""
        await self._shared.changed.wait()


class UnshapedLane(SegmentLane):
    """Way for the measurement of the device's own link before the run clock starts: only the segments'
    delays hold it up, so that all devices can measure at the same time."""

    rate = None
    is_full = False

    def put(self, item: Item, size: int, now: float) -> None:
        self._shared.scheduler.put_unshaped(self._device, item, now)


class _SegmentLoop:
    def __init__(self, scheduler: SegmentScheduler) -> None:
        self.scheduler = scheduler
        self.changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def advance(self) -> None:
        self._timer = deliver_due(self.scheduler, self._timer, self.advance)
        self.changed.set()
        self.changed.clear()


class SharedSegments:
    """All methods are called in the relay's thread."""

    def __init__(
        self, segments: Sequence[Segment], attached: Mapping[str, str], seed: int, dilation: float
    ) -> None:
        """`attached`: segment of each device. `seed`: seed of the run. `dilation`: host seconds per
        second of device time."""
        self._seed, self._dilation = seed, dilation
        self._attached = attached
        self._directions = {
            way: _SegmentLoop(
                SegmentScheduler(
                    segments,
                    attached,
                    way,
                    random.Random(f"{seed} segments {way}").random,  # noqa: S311
                )
            )
            for way in WAYS
        }
        self._counted: dict[tuple[Way, str], Counter[str]] = {}
        self._counted_at = time.monotonic()
        self._off: set[str] = set()
        self._is_measuring = False

    @property
    def segments(self) -> Mapping[str, Segment]:
        return self._directions["up"].scheduler.segments

    def lane(self, device: str, way: Way, kind: type[SegmentLane] = SegmentLane) -> list[SegmentLane]:
        """One lane, or none if the device shares no segment."""
        return [kind(self._directions[way], device)] if device in self._attached else []

    async def measure(self, names: Collection[str]) -> NetworkProbe:
        """Measure each segment in each direction, with one device alone, and with all at once. Nothing
        else may send much meanwhile."""
        self._is_measuring = True
        found = await asyncio.gather(*(self._measure(names, way) for way in WAYS))
        self._is_measuring = False
        self.use()
        return NetworkProbe(ROUTER, time.monotonic(), [figures for each in found for figures in each])

    async def _measure(self, names: Collection[str], way: Way) -> list[SegmentFigures]:
        found = []
        for probe in probes(self._attached, self.segments, way):
            if probe.segment not in names:
                continue
            measured = []
            for load in probe.loads:
                tries: list[float] = []
                while not is_enough(tries, load):
                    tries.append(await self._fill(probe, load))
                measured.append(nearest(tries, load))
            found.append(probe.figures(measured))
        return found

    async def _fill(self, probe: SegmentProbe[str], load: Mapping[str, float]) -> float:
        """Return the rate in bit/s while the devices in `load` send."""
        direction = self._directions[probe.way]
        senders = [direction.scheduler.add_sender(device) for device in load]
        lanes = [SegmentLane(direction, sender) for sender in senders]
        rate = sum(load.values())
        most = min(lane.piece for lane in lanes)
        size = max(_MIN_PIECE, min(most, int(rate / 8 * probe.seconds / _MEASURED_PIECES)))
        seconds = max(probe.seconds, _MEASURED_PIECES * 8 * on_wire(size) / rate)
        sending = [asyncio.create_task(_send(lane, size)) for lane in lanes]
        await asyncio.sleep(0.2 * seconds)  # first, the buckets become empty
        # From the end of one piece to that of another: of a slow segment, few pass in the time.
        end, ends = time.monotonic() + seconds, list[tuple[float, int]]()
        passed = first = direction.scheduler.passed[probe.segment].total()
        while (now := time.monotonic()) < end:
            if (total := direction.scheduler.passed[probe.segment].total()) != passed:
                ends.append((now, passed := total))
            await asyncio.sleep(_READ_SECONDS)
        for one in sending:
            one.cancel()
        await asyncio.wait(sending)
        for sender in senders:
            direction.scheduler.remove_sender(sender)
        if len(ends) < 2:
            return 8 * (passed - first) / seconds
        (begin, before), (last, after) = ends[0], ends[-1]
        return 8 * (after - before) / (last - begin)

    def change(self, segment: Segment) -> None:
        for one in self._directions.values():
            one.scheduler.change(segment, time.monotonic())
            one.advance()

    def cut(self, segment: str) -> None:
        for one in self._directions.values():
            one.scheduler.cut(segment, time.monotonic())

    def restore(self, segment: str) -> None:
        for one in self._directions.values():
            one.scheduler.restore(segment, time.monotonic())
            one.advance()

    def switch_background(self, segment: str, *, on: bool) -> None:
        (self._off.discard if on else self._off.add)(segment)
        if not on:
            for one in self._directions.values():
                one.scheduler.drop_background(segment)

    def start(self, run_time: float) -> None:
        """`run_time`: device time now, in seconds."""
        now = time.monotonic()
        for segment in self.segments.values():
            for one in segment.background:
                planned = schedule(
                    one,
                    self._seed,
                    segment.name,
                    epoch=now - run_time * self._dilation,
                    dilation=self._dilation,
                    now=now,
                )
                direction = self._directions[one.way]
                if background.is_flows(one):
                    send = partial(direction.scheduler.begin_transfer, segment.name)
                else:
                    send = partial(direction.scheduler.offer, direction.scheduler.stream(segment.name))
                self._send_background(direction, segment.name, planned, send)

    def _send_background(
        self,
        direction: _SegmentLoop,
        segment: str,
        planned: RateSchedule | TransferSchedule,
        send: Callable[[int, float], None],
    ) -> None:
        """Send what is due, and plan the next time. `send`: called with bytes and time."""
        now = time.monotonic()
        sizes = planned.take(now)
        if sizes and segment not in self._off:
            for size in sizes:
                send(size, now)
            direction.advance()
        if planned.next < math.inf:
            again = partial(self._send_background, direction, segment, planned, send)
            asyncio.get_running_loop().call_at(planned.next, again)

    def use(self) -> NetworkUse | None:
        """Since the last call; None if nothing has passed, or during a measurement."""
        if self._is_measuring:
            return None
        now, found = time.monotonic(), []
        for way, direction in self._directions.items():
            for name, total in direction.scheduler.passed.items():
                before = self._counted.get((way, name), Counter())
                self._counted[way, name] = total.copy()
                if new := {device: size for device, size in (total - before).items() if size}:
                    others = new.pop("", 0)
                    found.append(SegmentUse(name, way, new, others))
        seconds, self._counted_at = now - self._counted_at, now
        return NetworkUse(ROUTER, now, seconds, found) if found else None


async def _send(lane: SegmentLane, size: int) -> NoReturn:
    """Send pieces of `size` bytes as fast as there is room."""
    while True:
        while lane.is_full:
            await lane.wait_for_room()
        lane.put(_ignore, size, time.monotonic())
        lane.advance()
        await asyncio.sleep(0)


def _ignore() -> None: ...
