"""Activity of a device in the last minute, from a run's records, and an estimate of its present
activity.

What a device did for an update is recorded only when the update is applied. The activity after that is
inferred, and marked so: at first, the device is assumed to repeat its last cycle; after the length of
this cycle, telemetry shows whether the device uses its CPU. The record of the next update replaces it.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from agents.device_actions import Hold
from agents.events import UpdateApplied

DOWNLOAD, TRAIN, UPLOAD, WAIT, OFFLINE, PAUSED, UNPOWERED = STATES = (
    "download",
    "train",
    "upload",
    "wait",
    "offline",
    "paused",
    "unpowered",
)
MIN_BUSY_SHARE = 0.5
"""Minimum fraction of its CPU share that a device uses while it trains, more than to send or receive."""
WINDOW = 60
"""Seconds of device time for which the activity is kept."""

HELD_AS: dict[Hold, str] = {
    "unpowered": UNPOWERED,
    "down": OFFLINE,
    "cut off": OFFLINE,
    "frozen": PAUSED,
}
"""State for each hold that keeps a device from working. The first of several counts."""


class Span(NamedTuple):
    """A state from `begin` to `end`, in seconds of device time."""

    begin: float
    end: float
    state: str
    inferred: bool = False


class ActivityCell(NamedTuple):
    """Most frequent state of a device in a span of some seconds."""

    state: str
    inferred: bool


_Seconds = defaultdict[ActivityCell, float]


@dataclass(slots=True)
class Activity:
    """Times are device times in seconds. The methods are called roughly in the order of time."""

    _until: float = math.inf
    """Time up to which the activity is known; infinity if the device has never been present."""
    _seconds: dict[int, _Seconds] = field(default_factory=dict)
    """Seconds spent in each state, by second of device time."""
    _pending: deque[UpdateApplied] = field(default_factory=deque)
    """Updates that are not yet in `_seconds`, until the activity is requested."""
    _last: UpdateApplied | None = None
    _cycle: tuple[Span, ...] = ()
    """Spans of the activity for `_last`, from its dispatch to its arrival."""
    _applied: float = -math.inf
    """Time from which the device can get its next model: when `_last` was applied, or −infinity if it
    need not wait for that. It is assumed to wait if it did for the model of `_last`, which then was
    dispatched after the update before `_last` had been applied."""
    _idle: float = 0.0
    """Seconds between the last two cycles."""
    _busy: deque[tuple[float, bool]] = field(default_factory=deque)
    """(time of a sample, whether the device used its CPU since the previous one)."""
    _holds: dict[Hold, float] = field(default_factory=dict)
    """Start of each present hold."""
    _held: deque[Span] = field(default_factory=deque)
    """Spans of holds, without overlap. The end of a present hold is infinity."""

    def begin(self, at: float) -> None:
        """The device will get a model. The work that it was doing before is lost."""
        if math.isinf(self._until) and not (self._holds or self._pending):  # for the first time
            self._until = at
            return
        self._count_pending()
        self.hold("down", at)
        self.release("down", at)
        self._until = max(at, self._until) if math.isfinite(self._until) else at

    def add_update(self, update: UpdateApplied) -> None:
        """This must be cheap: a run in virtual time has very many updates, most of them older than a
        minute when the screen is drawn."""
        self._pending.append(update)
        while self._pending[0].applied < _oldest(update.applied):
            self._set_last(self._pending.popleft())

    def used_cpu(self, until: float, *, busy: bool) -> None:
        """Record whether the device used its CPU between the previous sample and `until`."""
        self._busy.append((until, busy))
        while self._busy[0][0] < _oldest(until):
            self._busy.popleft()

    def hold(self, what: Hold, at: float) -> None:
        """Nothing changes if the device is already in that state."""
        if what in self._holds:
            return
        if what in ("down", "unpowered"):  # its work is lost, and no update will report it
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
        """Known or inferred: the most frequent state of the last one or two seconds, because faster
        changes would not be readable."""
        if (held := self._held_as()) is not None:
            return held
        first = math.floor(at) - 1
        cell = _most(self._all_seconds(at, first), first, 2)
        return WAIT if cell is None else cell.state

    def cells(self, at: float, count: int) -> list[ActivityCell | None]:
        """Return the last minute as `count` cells, which must divide 60; None if nothing is known. The
        last cell contains `at`. Each covers fixed whole seconds, so that cells do not change as time
        passes."""
        width = WINDOW // count
        last = math.floor(at / width)
        seconds = self._all_seconds(at, (last - count + 1) * width)
        return [_most(seconds, k * width, width) for k in range(last - count + 1, last + 1)]

    def shares(self, at: float) -> dict[str, float]:
        """Seconds in each state in the last minute, inferred ones included."""
        shares = dict.fromkeys(STATES, 0.0)
        for spent in self._all_seconds(at, _oldest(at)).values():
            for cell, seconds in spent.items():
                shares[cell.state] += seconds
        return shares

    def _held_as(self) -> str | None:
        return next((state for what, state in HELD_AS.items() if what in self._holds), None)

    def _changed(self, at: float) -> None:
        """Update `_held` after a hold has started or ended."""
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
        """Yield the inferred activity after the last known one. While the device is held, its work
        stops. It continues afterwards, with the same remaining duration."""
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
                if end < first.end:  # the next span of the cycle starts there
                    free.insert(0, first._replace(begin=end))
                    break
        for rest in free:
            yield from self._by_cpu(rest)

    def _by_cpu(self, span: Span) -> Iterator[Span]:
        """Divide into training and waiting by telemetry; without it, all is what took longer in the last
        cycle."""
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
        """Yield the parts of `span` in which the device was not held."""
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
        self._count_pending()
        wanted = range(first, math.floor(at) + 1)
        seconds = {second: self._seconds[second].copy() for second in wanted if second in self._seconds}
        for span in self._inferred(at):
            _count(seconds, span, first)
        if self._held and math.isinf(self._held[-1].end):
            _count(seconds, self._held[-1]._replace(end=at), first)
        return seconds


def _oldest(at: float) -> int:
    return math.floor(at) - WINDOW


def _count(seconds: dict[int, _Seconds], span: Span, first: int | None = None) -> None:
    """Begin with second `first`; if it is None, add only the last minute of the span."""
    begin = max(span.begin, _oldest(span.end) if first is None else first)
    cell = ActivityCell(span.state, span.inferred)
    while begin < span.end:
        second = math.floor(begin)
        end = min(second + 1.0, span.end)
        seconds.setdefault(second, defaultdict(float))[cell] += end - begin
        begin = end


def _cycle(update: UpdateApplied, since: float) -> tuple[Span, ...]:
    """Spans from dispatch to arrival, without times before `since` and unknown ones."""
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


def _most(seconds: dict[int, _Seconds], begin: int, width: int) -> ActivityCell | None:
    """None if nothing is known."""
    total: dict[str, float] = defaultdict(float)
    inferred = 0.0
    for second in range(begin, begin + width):
        for cell, spent in seconds.get(second, {}).items():
            total[cell.state] += spent
            inferred += spent if cell.inferred else 0.0
    if not total:
        return None
    return ActivityCell(max(total, key=total.__getitem__), inferred > sum(total.values()) / 2)
