"""Transfers over links in virtual time.

Each device has one connection. In each `Direction`, the connection carries one message after the other.
A message passes the device's own link, the segments from the device's own one to the root, and the link
of the server. The messages in progress share these links max-min fairly (`testbed.virtual.fair_shares`).
If a message shares no link, the duration of its transfer is its size divided by the device's rate.

Background traffic of a segment passes this segment and those above it, but not the server's link.

With `packets`, messages are as in containers. They have the headers of MQTT and of their packets, are
acknowledged on the way back, and need time at the broker and at both ends. The rates of a device and of
segments are token buckets: after a pause, as many bits as the bucket contains pass without delay.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agents import random_generators
from agents.config import AccessLink, DrawnDuration, Segment, Way
from agents.device.link import burst
from agents.timing import durations
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from testbed.plan import PlannedDevice
from testbed.plan.costs import (
    DIGITS,
    HOPS,
    SMALL,
    acknowledgement_bytes,
    bytes_on_link,
    goodput,
    with_packet_headers,
)
from testbed.plan.planned_devices import PlannedTransfers
from testbed.virtual import timing
from testbed.virtual.fair_shares import FairShares, Pipe, Transfer
from testbed.virtual.timing import LINK, EventQueue

_FREE = AccessLink()
Route = tuple[FairShares | None, tuple[Pipe, ...]]
"""Shared links from the device to the server, and the shares of their rates; None if there are none."""
_HEADER, _SAME_SIZE = 512, 0.05
"""Bytes, and share of the size, by which messages of the same content may differ: numbers in headers
have more or fewer digits."""


def _ignore(_: Nanoseconds) -> None: ...


class Direction:
    """Messages arrive in the order of sending."""

    __slots__ = (
        *("_burst", "_device", "_events", "_index", "_latency", "_open", "_path", "_rate", "_shares"),
        *("_free", "_last", "_messages", "_packets", "_passes_at", "_reports", "_transfer"),
    )

    def __init__(
        self,
        queue: EventQueue,
        shared: Route,
        latency: Callable[[], Nanoseconds],
        *,
        packets: bool,
        device: str,
        index: int,
    ) -> None:
        """`shared`: links beside the device's own. `latency`: delay of the next message after the links.
        `packets`: whether the device's rate is a token bucket. `index`: position in device order."""
        self._events = queue
        self._shares, self._path = shared
        self._device = device
        self._index = index
        self._latency = latency
        self._packets = packets
        self._rate: float | None = None
        self._burst: Nanoseconds = 0
        """Time in which the device's rate fills the empty bucket; 0 without a bucket."""
        self._open = True
        self._messages: list[tuple[float, Callable[[Nanoseconds], None]]] = []
        """Messages that have not passed the links yet: remaining bits, and callback for the arrival
        time."""
        self._transfer: Transfer | None = None
        """The first message over shared links; None if it is not in progress."""
        self._passes_at: Nanoseconds | None = None
        """Time at which the first message has passed a link that is not shared; None if it is not in
        progress."""
        self._reports = False
        """True while the callback of a message runs."""
        self._last: Nanoseconds = 0
        """Arrival time of the last message that has passed."""
        self._free: Nanoseconds | None = None
        """Time at which all messages so far would have passed at the device's own rate without the
        bucket; None if none was sent."""

    def send(self, bits: float, then: Callable[[Nanoseconds], None]) -> None:
        """Call `then` with the arrival time as soon as it is certain: at once, or when the message has
        passed the links."""
        self._messages.append((bits, then))
        if len(self._messages) == 1:
            self._start_first()

    def change(self, rate: float | None, *, is_open: bool) -> None:
        """Change the rate of the device's own link in bit/s, also for the rest of messages in flight;
        None if unlimited. Nothing passes unless `is_open`."""
        if (rate, is_open) == (self._rate, self._open):
            return
        if self._in_progress:
            self._messages[0] = self._interrupt(), self._messages[0][1]
            self._free = self._events.now
        self._rate = rate
        self._burst = from_seconds(8 * burst(int(rate)) / rate) if rate and self._packets else 0
        self._open = is_open
        self._start_first()

    def drop(self) -> None:
        """Messages that have not passed the links yet are lost."""
        if self._in_progress:
            self._interrupt()
            self._free = self._events.now
        self._messages.clear()
        self._last = 0

    @property
    def _in_progress(self) -> bool:
        return self._transfer is not None or self._passes_at is not None

    def _interrupt(self) -> float:
        """Take the first message out of its links; return its remaining bits."""
        if self._transfer is not None:
            assert self._shares is not None  # noqa: S101  (a transfer is in progress)
            left = self._shares.leave(self._transfer)
        else:
            assert self._passes_at is not None  # noqa: S101  (the message is in progress)
            assert self._rate is not None  # noqa: S101  (else it had passed at once)
            left = to_seconds(self._passes_at - self._events.now) * self._rate
        self._transfer = self._passes_at = None
        return left

    def _on_done(self) -> None:
        self._transfer = self._passes_at = None
        self._arrive()
        self._start_first()

    def _pass_alone(self, bits: float, rate: float) -> None:
        """Let the first message pass the device's own link, which it shares with no other."""
        self._free = passes_at = self._send_start() + from_seconds(bits / rate)
        if passes_at <= self._events.now:
            self._arrive()
            return

        def passed() -> None:
            if self._passes_at == passes_at:  # else the transfer was interrupted
                self._on_done()

        self._passes_at = passes_at
        self._events.plan(passes_at, LINK, self._index, passed)

    def _start_first(self) -> None:
        """Start the first message, or continue it after a change. One that no link delays gets its
        arrival time at once."""
        while self._messages and self._open and not self._in_progress and not self._reports:
            bits, rate, tokens = self._messages[0][0], self._rate, 0.0
            if self._shares is None and bits and rate:
                self._pass_alone(bits, rate)
                continue
            if bits and rate:
                tokens = self._take_tokens(bits, rate)
            if all(pipe.rate == math.inf for pipe in self._path):
                self._count_use(min(bits, tokens) if rate else bits)
                bits, tokens = max(0.0, bits - tokens) if rate else 0.0, 0.0
            if bits and self._shares is not None:
                self._transfer = self._shares.enter(
                    bits,
                    self._path,
                    self._on_done,
                    own=rate or math.inf,
                    tokens=tokens,
                    device=self._device,
                )
                return
            self._arrive()

    def _count_use(self, bits: float) -> None:
        """Bits that pass at once."""
        for pipe in self._path if bits else ():
            pipe.devices_bits[self._device] = pipe.devices_bits.get(self._device, 0.0) + bits

    def _send_start(self) -> Nanoseconds:
        """Return the time at which a message sent now would have to start to arrive at the same time
        without the bucket. If the bucket is full, this is the present time minus the time that filling
        it took."""
        full = self._events.now - self._burst
        return full if self._free is None else max(self._free, full)

    def _take_tokens(self, bits: float, rate: float) -> float:
        """Take `bits` bits out of the bucket now. Return how many bits can pass without regard to the
        device's own rate."""
        begins = self._send_start()
        self._free = begins + from_seconds(bits / rate)
        return rate * to_seconds(max(0, self._events.now - begins))

    def _arrive(self) -> None:
        """Messages and changes by the callback wait until it returns. It may drop all messages, as when
        the device powers off."""
        _, then = self._messages.pop(0)
        self._reports = True
        then(self._arrival(self._events.now))
        self._reports = False

    def _arrival(self, passed: Nanoseconds) -> Nanoseconds:
        """No message arrives before an earlier one."""
        self._last = max(self._last, passed + self._latency())
        return self._last


class Line:
    """Connection between the server and a device, the same after restarts."""

    __slots__ = (
        *("_connected", "_draws", "_generator", "_packets", "_path", "_segments"),
        *("down", "link", "up"),
    )

    def __init__(
        self,
        queue: EventQueue,
        link: AccessLink,
        shared: tuple[Route, Route],
        generator: Callable[[], np.random.Generator],
        *,
        packets: bool,
        device: str = "",
        index: int = 0,
        segments: Sequence[VirtualSegment] = (),
    ) -> None:
        """`shared`: links for up and down. `generator`: called once, when a random number is first
        needed. `index`: position in device order. `segments`: those on its path."""
        self._packets = packets
        self._segments = segments
        self.link = link
        self._path = link
        """Delay, jitter and loss of the whole path, rates of the device's own link."""
        self._connected = True
        self._generator = generator
        self._draws: Callable[[], float] | None = None
        latency = self._latency
        self.up, self.down = (
            Direction(queue, route, latency, packets=packets, device=device, index=index)
            for route in shared
        )
        self.apply_link()

    def download(self, size: int, then: Callable[[Nanoseconds], None]) -> None:
        """`size`: bytes; 0 for a small request. Call `then` with the arrival time as soon as it is
        certain."""
        self._send(self.down, self.up, size, then)

    def upload(self, size: int, then: Callable[[Nanoseconds], None]) -> None:
        """`size`: bytes. Call `then` with the arrival time as soon as it is certain."""
        self._send(self.up, self.down, size, then)

    def bytes_of(self, size: int) -> tuple[int, int]:
        """Bytes on the link of a message of `size` bytes: in its direction, and of acknowledgements in
        the other."""
        if not self._packets:
            return size, 0
        return bytes_on_link(size or SMALL), acknowledgement_bytes(size)

    def update_size(self, size: int) -> int:
        """With `packets`, the digits of the numbers in the update's header are added."""
        return size + DIGITS if self._packets else size

    def hand_in(self, size: int, then: Callable[[Nanoseconds], None]) -> None:
        """Upload an update of `size` bytes, as `update_size` changes it."""
        self.upload(self.update_size(size), then)

    def acknowledge(self) -> None:
        """The aggregator acknowledges an update."""
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
        """Change fields of `agents.config.AccessLink`, also for messages in flight that have not passed
        their links."""
        self.link = self.link.with_changes(changes)
        self.apply_link()

    def plug(self, *, connected: bool) -> None:
        """Messages in flight wait while it is disconnected."""
        self._connected = connected
        self.apply_link()

    def drop(self) -> None:
        """All messages in flight in both directions are lost."""
        self.up.drop()
        self.down.drop()

    @property
    def is_cut(self) -> bool:
        """A segment on the path lets no packets pass."""
        return any(one.is_outage for one in self._segments)

    def apply_link(self) -> None:
        self._path = path = self.link.delayed_by([one.settings for one in self._segments])
        is_open = self._connected and not (self.link.is_outage or self.is_cut)
        for direction, rate in ((self.up, path.up), (self.down, path.down)):
            direction.change(goodput(rate, path.rtt, path.loss), is_open=is_open)

    def _latency(self) -> Nanoseconds:
        """Delay of the next message in one direction, random with jitter or loss."""
        path = self._path
        hops = HOPS if self._packets else 0.0
        if not (path.jitter or path.loss):
            return from_seconds(hops + path.rtt / 2)
        if self._draws is None:
            self._draws = self._generator().random
        return from_seconds(hops + timing.latency(path.rtt, path.jitter, path.loss, self._draws))


class VirtualSegment:
    def __init__(self, settings: Segment, up: Pipe, down: Pipe) -> None:
        self.settings = settings
        """Present properties."""
        self.pipes: dict[Way, Pipe] = {"up": up, "down": down}
        self.lines: list[Line] = []
        """Devices below the segment."""
        self.is_cut = False

    @property
    def is_outage(self) -> bool:
        """True while the segment lets no packets pass."""
        return (
            self.is_cut
            or AccessLink(self.settings.up, self.settings.down, loss=self.settings.loss).is_outage
        )

    def rate(self, way: Way) -> float:
        """Rate left to senders in bit/s: lost packets do not count."""
        if self.is_outage:
            return 0.0
        rate = self.settings.rate(way)
        return math.inf if rate is None else rate * (1 - self.settings.loss)


class TimedLine(Line):
    """Connection whose transfers have given durations, such as those of a recorded run. Requests and
    acknowledgements take no time. Each transfer begins when it is ordered, stands still while the device
    is cut off, and none arrives before an earlier one in its direction."""

    __slots__ = ("_events", "_index", "_lasting", "_under_way")

    def __init__(
        self,
        queue: EventQueue,
        transfers: PlannedTransfers,
        generator: Callable[[], np.random.Generator],
        index: int = 0,
    ) -> None:
        self._events, self._index = queue, index
        self._under_way: dict[Direction, deque[_TimedTransfer]] = {}
        none: Route = (None, ())
        super().__init__(queue, _FREE, (none, none), generator, packets=False)
        rng = generator()
        self._lasting = {
            self.up: _durations(transfers.upload, transfers.update_bytes, rng),
            self.down: _durations(transfers.download, transfers.model_bytes, rng),
        }
        self._under_way = {self.up: deque(), self.down: deque()}

    def _send(
        self, there: Direction, back: Direction, size: int, then: Callable[[Nanoseconds], None]
    ) -> None:
        takes = self._lasting[there](size) if size else 0
        transfer = _TimedTransfer(takes, then)
        self._under_way[there].append(transfer)
        if self._is_open:
            self._go_on(there, transfer)

    def _go_on(self, there: Direction, transfer: _TimedTransfer) -> None:
        due = transfer.due = self._events.now + transfer.left

        def pass_on() -> None:
            if transfer.due != due:  # the device was cut off
                return
            transfer.due, transfer.left = None, 0
            waiting = self._under_way[there]
            while waiting and not waiting[0].left:
                waiting.popleft().then(self._events.now)

        if due == self._events.now:
            pass_on()
        else:
            self._events.plan(due, LINK, self._index, pass_on)

    @property
    def _is_open(self) -> bool:
        return self._connected and not self.link.is_outage

    def apply_link(self) -> None:
        for there, transfers in self._under_way.items():
            for transfer in list(transfers):
                if transfer.due is not None and not self._is_open:
                    transfer.left, transfer.due = transfer.due - self._events.now, None
                elif transfer.due is None and self._is_open:
                    self._go_on(there, transfer)

    def drop(self) -> None:
        for transfers in self._under_way.values():
            for transfer in transfers:
                transfer.due = None
            transfers.clear()


@dataclass(slots=True)
class _TimedTransfer:
    left: Nanoseconds
    """Duration from now on, or from `due` − `left` on if in progress."""
    then: Callable[[Nanoseconds], None]
    due: Nanoseconds | None = None
    """Time of arrival; None while it stands still."""


def _durations(
    duration: DrawnDuration | None, usual: int | None, rng: np.random.Generator
) -> Callable[[int], Nanoseconds]:
    """Duration of a transfer by its bytes. `usual`: bytes that `duration` refers to; None if the size
    has no influence."""
    if duration is None:
        return lambda _: 0
    draw = durations.sampler(duration, rng)

    def takes(size: int) -> Nanoseconds:
        near = usual is None or abs(size - usual) <= max(_HEADER, _SAME_SIZE * usual)
        return from_seconds(draw() * (1.0 if usual is None or near else size / usual))

    return takes


class VirtualNetwork:
    def __init__(
        self,
        queue: EventQueue,
        seed: int,
        server_link: AccessLink | None = None,
        *,
        packets: bool = False,
    ) -> None:
        """`packets`: whether transfers consist of packets, as on emulated links."""
        self._packets = packets
        self._events = queue
        self._seed = seed
        link = server_link or _FREE
        rates: dict[Way, int | None] = {"up": link.down, "down": link.up}  # it downloads uploads
        self._server: dict[Way, tuple[FairShares, Pipe]] = {}
        for way, rate in rates.items():
            if rate is not None:
                shares = FairShares(queue)
                self._server[way] = shares, shares.add(Pipe(rate))
        self.segments: dict[str, VirtualSegment] = {}
        self._routes: dict[tuple[Way, str | None], Route] = {}
        """Routes from each segment that devices are attached to; from None for devices without one."""
        self._shares: dict[tuple[str, Way], FairShares] = {}
        """Shares of the tree that a segment belongs to, by the segment's name."""

    def line(self, device: PlannedDevice, index: int = 0) -> Line:
        """`index`: position in device order."""
        segments = [self._segment(one, device.path[-1].name) for one in reversed(device.path)][::-1]
        root = device.path[-1].name if device.path else None
        generator = functools.partial(random_generators.generator, self._seed, device.name, "link")
        if device.transfers is not None:
            return TimedLine(self._events, device.transfers, generator, index)
        line = Line(
            self._events,
            device.link or _FREE,
            (self._route("up", root, segments), self._route("down", root, segments)),
            generator,
            packets=self._packets,
            device=device.name,
            index=index,
            segments=segments,
        )
        for segment in segments:
            segment.lines.append(line)
        return line

    def add_segments(self, segments: Iterable[Segment]) -> None:
        """A parent comes before its children."""
        roots: dict[str, str] = {}
        for one in segments:
            roots[one.name] = one.name if one.parent is None else roots[one.parent]
            self._segment(one, roots[one.name])

    def change(self, name: str, changes: Mapping[str, float | None]) -> None:
        segment = self.segments[name]
        segment.settings = segment.settings.with_changes(changes)
        self._apply(name)

    def cut(self, name: str, *, is_cut: bool) -> None:
        """Messages in flight wait while the segment is cut."""
        self.segments[name].is_cut = is_cut
        self._apply(name)

    def background_bytes(self, size: float) -> float:
        """Bytes on the link of a background transfer."""
        return with_packet_headers(round(size)) if self._packets else size

    def shares_of(self, name: str, way: Way) -> FairShares:
        return self._shares[name, way]

    def _apply(self, name: str) -> None:
        segment = self.segments[name]
        for way, pipe in segment.pipes.items():
            self._set_rate(name, way, pipe, segment.rate(way))
        for line in segment.lines:
            line.apply_link()

    def _set_rate(self, name: str, way: Way, pipe: Pipe, rate: float) -> None:
        """Set the rate of the segment `name`. With `packets`, the segment is a token bucket."""
        has_bucket = self._packets and 0 < rate < math.inf
        self._shares[name, way].set_rate(pipe, rate, 8.0 * burst(int(rate)) if has_bucket else 0.0)

    def _segment(self, settings: Segment, root: str) -> VirtualSegment:
        """Adds a new segment. `root`: name of the root above it."""
        if settings.name not in self.segments:
            up, down = Pipe(), Pipe()
            made = self.segments[settings.name] = VirtualSegment(settings, up, down)
            for way, pipe in made.pipes.items():
                shares = self._root_shares(root, way)
                self._shares[settings.name, way] = shares
                shares.add(pipe)
                self._set_rate(settings.name, way, pipe, made.rate(way))
        return self.segments[settings.name]

    def _root_shares(self, root: str, way: Way) -> FairShares:
        if way in self._server:
            return self._server[way][0]
        return self._shares.get((root, way)) or FairShares(self._events)

    def _route(self, way: Way, root: str | None, segments: Sequence[VirtualSegment]) -> Route:
        key = way, segments[0].settings.name if segments else None
        if key not in self._routes:
            pipes = tuple(one.pipes[way] for one in segments)
            shares = None if root is None else self._shares[root, way]
            if (server := self._server.get(way)) is not None:
                shares, pipes = server[0], (*pipes, server[1])
            self._routes[key] = shares, pipes
        return self._routes[key]
