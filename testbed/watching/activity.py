"""Activity of a device in the last minute, from a run's records, and what it seems to do now.

Pure. A cycle of a device is known once its update has been applied; during a round nothing is recorded.
So what follows the last update is inferred, and marked as such: it is laid out like the cycle before;
what goes beyond that, by the device's use of its CPU, where there is telemetry. The record of the next
update replaces what was inferred.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from agents.device_actions import Hold
from agents.events import UpdateApplied

DOWNLOAD, TRAIN, UPLOAD, WAIT, OFFLINE, PAUSED = STATES = (
    "download",
    "train",
    "upload",
    "wait",
    "offline",
    "paused",
)
WINDOW = 60
"""Seconds of device time that are kept: the last minute."""

_HELD_AS: dict[Hold, str] = {"down": OFFLINE, "cut off": OFFLINE, "frozen": PAUSED}
"""What keeps a device from working, the strongest first, and the state that it then is in."""


class Span(NamedTuple):
    begin: float
    end: float
    state: str
    inferred: bool = False


class Cell(NamedTuple):
    """What a device did for most of some seconds."""

    state: str
    inferred: bool


_Seconds = defaultdict[Cell, float]


@dataclass(slots=True)
class Activity:
    """Activity of one device. Times are device time in seconds and arrive roughly in order."""

    _until: float = math.inf
    """How far it is known what the device did; infinity before it was ever there."""
    _seconds: dict[int, _Seconds] = field(default_factory=dict)
    """By whole second: how much of it went into what."""
    _pending: deque[UpdateApplied] = field(default_factory=deque)
    """Not yet counted in: nobody has looked since."""
    _last: UpdateApplied | None = None
    """The last that was counted in."""
    _cycle: tuple[Span, ...] = ()
    """Spans of the cycle of `_last`."""
    _applied: float = -math.inf
    """When that one was, if the next model came with it; minus infinity where it came before."""
    _idle: float = 0.0
    """Seconds between the last two cycles."""
    _busy: deque[tuple[float, bool]] = field(default_factory=deque)
    """Until when the device used, or did not use, its CPU."""
    _holds: dict[Hold, float] = field(default_factory=dict)
    _held: deque[Span] = field(default_factory=deque)
    """What has kept it from working, without overlaps; the end of what still does is infinity."""

    def begin(self, at: float) -> None:
        """The device is there, and will be sent a model; what it was working on is lost."""
        self._count_pending()
        self.hold("down", at)
        self.release("down", at)
        self._until = max(at, self._until) if math.isfinite(self._until) else at

    def updated(self, update: UpdateApplied) -> None:
        """Cheap: a run in virtual time has very many updates, most of them outdated when the screen is
        drawn."""
        self._pending.append(update)
        while self._pending[0].applied < _oldest(update.applied):
            self._set_last(self._pending.popleft())

    def used_cpu(self, until: float, *, busy: bool) -> None:
        """Note what telemetry reports for the time since the previous sample."""
        self._busy.append((until, busy))
        while self._busy[0][0] < _oldest(until):
            self._busy.popleft()

    def hold(self, what: Hold, at: float) -> None:
        """From now on the device is `down`, `cut off` or `frozen`; that it is so already is no error."""
        if what in self._holds:
            return
        if what == "down":  # its work is lost, and no update will report it
            self._count_pending()
            for span in self._inferred(at):
                self._add(span)
            self._until, self._applied = at, -math.inf
        self._holds[what] = at
        self._changed(at)

    def release(self, what: Hold, at: float) -> None:
        if self._holds.pop(what, None) is not None:
            self._changed(at)

    def now(self, at: float) -> str:
        """The state that the device is in, or seems to be: that of most of the last second or two, as
        nobody can read what changes faster."""
        if (held := self._held_as()) is not None:
            return held
        first = math.floor(at) - 1
        found = _most(self._all_seconds(at, first), first, 2)
        return WAIT if found is None else found.state

    def cells(self, at: float, count: int) -> list[Cell | None]:
        """The last minute in `count` cells, a divisor of 60; None where nothing is known. The last cell
        has `at` in it. They stand still while time goes on: each has its own seconds."""
        width = WINDOW // count
        last = math.floor(at / width)
        seconds = self._all_seconds(at, (last - count + 1) * width)
        return [_most(seconds, k * width, width) for k in range(last - count + 1, last + 1)]

    def shares(self, at: float) -> dict[str, float]:
        """Seconds of the last minute in each state, inferred ones among them."""
        shares = dict.fromkeys(STATES, 0.0)
        for spent in self._all_seconds(at, _oldest(at)).values():
            for cell, seconds in spent.items():
                shares[cell.state] += seconds
        return shares

    def _held_as(self) -> str | None:
        return next((state for what, state in _HELD_AS.items() if what in self._holds), None)

    def _changed(self, at: float) -> None:
        """Something holds the device, or holds it no more."""
        state = self._held_as()
        if self._held and math.isinf(self._held[-1].end):
            open_span = self._held[-1]
            if open_span.state == state:
                return
            self._held[-1] = ended = open_span._replace(end=max(at, open_span.begin))
            self._add_seconds(ended)
        if state is not None:
            self._held.append(Span(at, math.inf, state))
        while self._held[0].end < _oldest(at):
            self._held.popleft()

    def _count_pending(self) -> None:
        """Add the updates that are pending to the seconds."""
        for update in self._pending:
            since, last = self._until, self._last
            for span in (Span(since, update.dispatched, WAIT), *_cycle(update, since)):
                self._add(span)
            if math.isfinite(since):
                self._idle = max(0.0, update.dispatched - since)
            prompt = last is None or update.dispatched < last.applied
            self._applied = -math.inf if prompt else update.applied
            self._cycle = _cycle(update, -math.inf if last is None else last.arrived)
            self._set_last(update)
        self._pending.clear()

    def _set_last(self, update: UpdateApplied) -> None:
        self._last = update
        self._until = max(self._until, update.arrived) if math.isfinite(self._until) else update.arrived

    def _inferred(self, at: float) -> Iterator[Span]:
        """What the device seems to have done since the last thing known. The time of a pause does not
        count: work goes on after it."""
        begin = min(max(self._until, self._applied), at)
        yield from self._free(Span(self._until, begin, WAIT, inferred=True))
        free = list(self._free(Span(begin, at, WAIT, inferred=True)))
        for span in self._cycle:
            left = span.end - span.begin
            while free and left > 0:
                first = free.pop(0)
                end = min(first.begin + left, first.end)
                yield Span(first.begin, end, span.state, inferred=True)
                left -= first.end - first.begin
                if end < first.end:  # the next one of the cycle goes on from there
                    free.insert(0, first._replace(begin=end))
                    break
        for rest in free:
            yield from self._by_cpu(rest)

    def _by_cpu(self, span: Span) -> Iterator[Span]:
        """`span` cut by what telemetry tells; without it, the device is at what takes it longest."""
        begin, state = span.begin, TRAIN
        if not self._busy:
            trained = sum(part.end - part.begin for part in self._cycle if part.state == TRAIN)
            state = WAIT if self._idle > trained else TRAIN
        for until, busy in self._busy:
            state = TRAIN if busy else WAIT
            if until > begin:
                end = min(until, span.end)
                yield Span(begin, end, state, inferred=True)
                begin = end
            if begin >= span.end:
                return
        yield Span(begin, span.end, state, inferred=True)

    def _free(self, span: Span) -> Iterator[Span]:
        """The parts of `span` in which nothing kept the device from working."""
        begin = span.begin
        for held in self._held:
            if held.begin >= span.end:
                break
            if held.begin > begin:
                yield span._replace(begin=begin, end=held.begin)
            begin = max(begin, held.end)
        if span.end > begin:
            yield span._replace(begin=begin)

    def _add(self, span: Span) -> None:
        for free in self._free(span):
            self._add_seconds(free)

    def _add_seconds(self, span: Span) -> None:
        _count(self._seconds, span)
        if len(self._seconds) > 2 * WINDOW:
            for second in sorted(self._seconds)[: -WINDOW - 1]:
                del self._seconds[second]

    def _all_seconds(self, at: float, first: int) -> dict[int, _Seconds]:
        """What is known, inferred and still goes on, from the second `first` until `at`."""
        self._count_pending()
        wanted = range(first, math.floor(at) + 1)
        seconds = {second: self._seconds[second].copy() for second in wanted if second in self._seconds}
        for span in self._inferred(at):
            _count(seconds, span, first)
        if self._held and math.isinf(self._held[-1].end):
            _count(seconds, self._held[-1]._replace(end=at), first)
        return seconds


def _oldest(at: float) -> int:
    """The first second of the last minute, which has whole seconds."""
    return math.floor(at) - WINDOW


def _count(seconds: dict[int, _Seconds], span: Span, first: int | None = None) -> None:
    """Add `span`, the last minute of it at the most, to each of its seconds."""
    begin = max(span.begin, _oldest(span.end) if first is None else first)
    cell = Cell(span.state, span.inferred)
    while begin < span.end:
        second = math.floor(begin)
        end = min(second + 1.0, span.end)
        seconds.setdefault(second, defaultdict(float))[cell] += end - begin
        begin = end


def _cycle(update: UpdateApplied, since: float) -> tuple[Span, ...]:
    """What a client did from dispatch to arrival, as far as it was after `since`; a time that is not
    known leaves its spans out."""
    u = update
    spans = (
        Span(u.dispatched, u.downloaded, DOWNLOAD),
        Span(u.downloaded, u.train_start - u.masking, WAIT),
        Span(u.train_start - u.masking, u.train_end, TRAIN),
        Span(u.train_end, u.sent, WAIT),
        Span(u.sent, u.arrived, UPLOAD),
    )
    later = (span._replace(begin=max(span.begin, since)) for span in spans)
    return tuple(span for span in later if span.end > span.begin)


def _most(seconds: dict[int, _Seconds], begin: int, width: int) -> Cell | None:
    """What most of the `width` seconds from `begin` on went into."""
    total: dict[str, float] = defaultdict(float)
    inferred = 0.0
    for second in range(begin, begin + width):
        for cell, spent in seconds.get(second, {}).items():
            total[cell.state] += spent
            inferred += spent if cell.inferred else 0.0
    if not total:
        return None
    return Cell(max(total, key=total.__getitem__), inferred > sum(total.values()) / 2)
