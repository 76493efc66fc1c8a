"""Max-min fair rates over a tree of shared links, in virtual time.

A transfer passes all pipes from its device to the server, and may have a limit of its own. Rates are
max-min fair (`agents.links.max_min`) at each moment. They are computed again when a transfer begins or
ends, and when a pipe changes.

Transfers with the same path and the same limit always have the same rate. They form a class, and a class
needs one sum only: the bits that each of its transfers would have sent since the class began. A class is
either as fast as its limit, and its sum follows from the time; or it has the level of its path, and its
sum follows from that of the path. So an event changes only the classes that go from one to the other.
Its cost grows with the number of paths, and only logarithmically with that of transfers.

Traffic that does not react to congestion (`set_fixed`) takes its rate before the transfers share the
rest. If a pipe is too small for it, it shares the pipe max-min fairly among itself.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

from agents.links.max_min import Branch, RateClaim, SharedLimit, share_out
from agents.timing.nanoseconds import SECOND, Nanoseconds, from_seconds, to_seconds
from testbed.virtual.timing import LINK, EventQueue

_NANOSECOND = 1e-9
"""One nanosecond, in seconds: a transfer that needs at most this time counts as finished."""
_NO_CAPACITY = 1e-9
"""Below this share of a pipe's rate, what is left of it counts as 0: it is a rounding error."""


class Pipe(SharedLimit):
    """Link in one direction. `free`: rate beside the fixed traffic."""

    __slots__ = ("background_bits", "bucket", "devices_bits", "rate", "saved")

    def __init__(self, rate: float = math.inf) -> None:
        super().__init__(rate)
        self.rate = rate
        """bit/s; infinite if not limited, 0 while nothing passes."""
        self.bucket = self.saved = 0.0
        """Size and content of the token bucket in bits. Unused rate fills it, bits of new transfers
        empty it."""
        self.devices_bits: dict[str, float] = {}
        """Bits of each device since the use was last read."""
        self.background_bits = 0.0
        """Bits of background traffic since the use was last read."""


class _Class(RateClaim):
    __slots__ = ("drained", "end", "is_at_cap", "order", "own", "path", "served", "since", "tokens")

    def __init__(self, path: _Path, own: float, *, is_burst: bool) -> None:
        super().__init__(math.inf if is_burst else own, 0)
        self.path = path
        self.own = own
        """Limit of each transfer in bit/s; infinite if there is none."""
        self.is_at_cap = False
        """True if the rate of each transfer is the cap; else it is the level of the path."""
        self.served = 0.0
        """Bits of each transfer from the begin of the class until `since`."""
        self.since: float = path.served
        """Nanoseconds if `is_at_cap`; else a value of the path's `served`."""
        self.end: float = math.inf
        """Time or value, as in `since`, at which the first transfer has passed."""
        self.order: list[tuple[float, int, Transfer]] = []
        """Heap of (bits at which the transfer has passed, number, transfer). Transfers that have left
        may still be in it, but not at its top."""
        self.drained = 0.0
        """Bits that each transfer would have taken out of its token bucket since the class began."""
        self.tokens: list[tuple[float, int, Transfer]] = []
        """Heap of (value of `drained` at which the bucket is empty, number, transfer). Transfers that
        have left may still be in it. Empty unless the transfers have tokens."""

    @property
    def rate(self) -> float:
        """bit/s of each transfer."""
        return self.cap if self.is_at_cap else self.path.level

    def served_by(self, now: Nanoseconds) -> float:
        """Bits of each transfer since the class began."""
        if not self.is_at_cap:
            return self.served + (self.path.served - self.since)
        passed = now - self.since
        return self.served + (self.cap * (passed / SECOND) if passed else 0.0)


class _Path(Branch[Pipe, _Class]):
    __slots__ = ("at_cap", "bursts", "ends", "served")

    def __init__(self, path: tuple[Pipe, ...]) -> None:
        super().__init__(path)
        self.served = 0.0
        """Bits that a transfer would have sent at the path's level, since the path was in use."""
        self.at_cap = 0
        """Number of the classes at their caps: the first of `claims`."""
        self.ends: list[_ClassEnd] = []
        """Heap of the classes at the path's level. Former ends may still be in it."""
        self.bursts: list[_Class] = []


_ClassEnd = tuple[float, int, _Class]
"""End of a class, a number that no other one has, and the class."""


class Transfer:
    __slots__ = ("device", "end", "in_class", "mark", "number", "on_done", "own", "path")

    def __init__(
        self,
        path: tuple[Pipe, ...],
        own: float,
        number: int,
        device: str | None,
        on_done: Callable[[], None],
    ) -> None:
        self.path, self.own, self.number = path, own, number
        self.device = device
        """None for background traffic."""
        self.on_done = on_done
        self.in_class: _Class | None = None
        self.end = 0.0
        """Value of the class's `served` at which the transfer has passed."""
        self.mark = 0.0
        """Value of the class's `served` up to which the transfer's bits were counted."""


class FairShares:
    """Pipes form one tree."""

    def __init__(self, queue: EventQueue) -> None:
        self._events = queue
        self._pipes: list[Pipe] = []
        self._paths: dict[tuple[Pipe, ...], _Path] = {}
        self._classes: dict[tuple[tuple[Pipe, ...], float, bool], _Class] = {}
        self._at_cap: list[_ClassEnd] = []
        """Heap of the classes at their caps. Former ends may still be in it."""
        self._changed: dict[_Path, None] = {}
        """Paths whose classes have changed since the rates were computed."""
        self._fixed: dict[object, tuple[tuple[Pipe, ...], float]] = {}
        """Path and wanted bit/s of traffic that does not react to congestion, by its source."""
        self._fixed_rates: list[tuple[tuple[Pipe, ...], float]] = []
        """Path and bit/s of this traffic."""
        self._numbers = itertools.count()
        self._since: Nanoseconds = 0
        self._check_at: Nanoseconds | None = None
        """Planned check, in nanoseconds; None if there is none."""

    def add(self, pipe: Pipe) -> Pipe:
        self._pipes.append(pipe)
        return pipe

    @property
    def is_idle(self) -> bool:
        return not self._paths

    def enter(
        self,
        bits: float,
        path: tuple[Pipe, ...],
        on_done: Callable[[], None],
        *,
        own: float = math.inf,
        tokens: float = 0.0,
        device: str | None = None,
    ) -> Transfer:
        """Begin a transfer. The bits for which all buckets on the path have tokens pass at once.

        Some pipe, or `own`, must be limited. `own`: the transfer's own limit in bit/s. `tokens`: bits
        that pass without this limit. `device`: None for background traffic. `on_done`: called when all
        bits have passed.
        """
        self._progress()
        transfer = Transfer(path, own, next(self._numbers), device, on_done)
        at_once = _take_saved(path, min(bits, tokens) if own < math.inf else bits)
        _count_bits(path, device, at_once)
        self._join(transfer, bits - at_once, tokens - at_once)
        self._update()
        return transfer

    def leave(self, transfer: Transfer) -> float:
        """Return the bits that the transfer has not sent."""
        self._progress()
        left = self._quit(transfer)
        self._update()
        return left

    def set_rate(self, pipe: Pipe, rate: float, bucket: float = 0.0) -> None:
        """`rate`: bit/s; 0 lets nothing pass. `bucket`: size of its token bucket, in bits."""
        if rate != pipe.rate:
            self._progress()
            pipe.rate = rate
            pipe.saved = bucket if not pipe.bucket else min(pipe.saved, bucket)
            pipe.bucket = bucket
            self._update_fixed()

    def set_fixed(self, source: object, path: tuple[Pipe, ...], rate: float) -> None:
        """`rate`: bit/s without regard to congestion."""
        self._progress()
        if rate:
            self._fixed[source] = path, rate
        else:
            self._fixed.pop(source, None)
        self._update_fixed()

    def count_use(self) -> None:
        """Count all bits until now."""
        self._progress()
        for one in self._classes.values():
            served = one.served_by(self._events.now)
            for end, _, transfer in one.order:
                if transfer.in_class is one and transfer.end == end:
                    self._count(transfer, served)

    # Transfers

    def _join(self, transfer: Transfer, bits: float, tokens: float) -> None:
        is_burst = tokens > 0 and transfer.own < math.inf
        key = transfer.path, transfer.own, is_burst
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = self._new_class(transfer, is_burst=is_burst)
        transfer.in_class, transfer.mark = found, found.served_by(self._events.now)
        transfer.end = transfer.mark + bits
        found.count += 1
        heapq.heappush(found.order, (transfer.end, transfer.number, transfer))
        if is_burst:
            heapq.heappush(found.tokens, (found.drained + tokens, transfer.number, transfer))
        self._mark(found.path)
        if found.order[0][2] is transfer:
            self._set_end(found)

    def _new_class(self, transfer: Transfer, *, is_burst: bool) -> _Class:
        path = self._paths.get(transfer.path)
        if path is None:
            path = self._paths[transfer.path] = _Path(transfer.path)
        made = _Class(path, transfer.own, is_burst=is_burst)
        if path.add(made) < path.at_cap:
            path.at_cap += 1
            made.is_at_cap, made.since = True, self._events.now
        if is_burst:
            path.bursts.append(made)
        return made

    def _quit(self, transfer: Transfer) -> float:
        """Return the remaining bits."""
        found = transfer.in_class
        if found is None:
            return 0.0
        served = found.served_by(self._events.now)
        self._count(transfer, served)
        transfer.in_class = None
        found.count -= 1
        self._mark(found.path)
        if not found.count:
            self._remove(found)
        elif found.order[0][2] is transfer:
            self._set_end(found)
        return max(0.0, transfer.end - served)

    def _mark(self, path: _Path) -> None:
        """Note that the classes of the path have changed."""
        self._changed[path] = None
        for pipe in path.path:
            pipe.is_stale = True

    def _remove(self, one: _Class) -> None:
        """Remove a class without transfers."""
        path, is_burst = one.path, one.cap > one.own
        del self._classes[path.path, one.own, is_burst]
        path.remove(one)
        path.at_cap -= one.is_at_cap
        one.end = math.nan
        if is_burst:
            path.bursts.remove(one)
        if not path.claims:
            del self._paths[path.path], self._changed[path]

    @staticmethod
    def _count(transfer: Transfer, upto: float) -> None:
        """Count bits since they were last counted. `upto`: bits that the class has served."""
        bits = min(upto, transfer.end) - transfer.mark
        if bits <= 0:
            return
        transfer.mark += bits
        _count_bits(transfer.path, transfer.device, bits)

    # Ends

    def _set_end(self, one: _Class) -> None:
        """Compute the end of a class, whose first transfer or rate has changed."""
        while one.order[0][2].in_class is not one:
            heapq.heappop(one.order)
        left = max(0.0, one.order[0][0] - one.served_by(self._events.now))
        if one.is_at_cap:
            one.end, heap = self._events.now + from_seconds(left / one.cap), self._at_cap
        else:
            one.end, heap = one.path.served + left, one.path.ends
        heapq.heappush(heap, (one.end, next(self._numbers), one))

    @staticmethod
    def _first(heap: list[_ClassEnd], *, is_at_cap: bool) -> _Class | None:
        """`heap`: classes at their caps, or those of a path at its level."""
        while heap:
            end, _, one = heap[0]
            if end == one.end and one.is_at_cap == is_at_cap:
                return one
            heapq.heappop(heap)
        return None

    def _remaining(self) -> float:
        """Seconds until the first transfer has passed, or has no tokens left; infinite if nothing
        passes."""
        found = math.inf
        if (first := self._first(self._at_cap, is_at_cap=True)) is not None:
            found = (first.end - self._events.now) / SECOND
        for path in self._paths.values():
            if (first := self._first(path.ends, is_at_cap=False)) is not None:
                left = first.end - path.served
                if path.level:
                    found = min(found, left / path.level)
                elif left <= 0:
                    return 0.0
            for one in path.bursts:
                found = min(found, self._burst_remaining(one))
        return found

    @staticmethod
    def _burst_remaining(one: _Class) -> float:
        """Seconds until the first transfer of the class has no tokens left; infinite if its bucket gets
        no emptier."""
        while one.tokens[0][2].in_class is not one:  # a transfer of the class is in the heap
            heapq.heappop(one.tokens)
        faster = one.path.level - one.own
        return (one.tokens[0][0] - one.drained) / faster if faster > 0 else math.inf

    # Rates

    def _progress(self) -> None:
        elapsed = to_seconds(self._events.now - self._since)
        self._since = self._events.now
        if not elapsed:
            return
        for path in self._paths.values():
            if path.level < math.inf:  # else all classes are at their caps
                path.served += path.level * elapsed
            for one in path.bursts:
                one.drained += max(0.0, path.level - one.own) * elapsed
        for pipes, rate in self._fixed_rates:
            for pipe in pipes:
                pipe.background_bits += rate * elapsed
        for pipe in self._pipes:
            if pipe.saved < pipe.bucket:
                pipe.saved = min(pipe.bucket, pipe.saved + pipe.unused * elapsed)

    def _update_fixed(self) -> None:
        """Compute the rates of the fixed traffic, then those of the transfers."""
        for pipe in self._pipes:
            pipe.free, pipe.is_stale = pipe.rate, True
        branches: dict[tuple[Pipe, ...], Branch[Pipe, RateClaim]] = {}
        for path, rate in self._fixed.values():
            branches.setdefault(path, Branch(path)).add(RateClaim(rate))
        for one in branches.values():
            one.count()
        share_out(branches.values(), self._pipes)
        self._fixed_rates = [
            (path, min(rate, branches[path].level)) for path, rate in self._fixed.values()
        ]
        for pipe in self._pipes if branches else ():
            pipe.is_stale = True
            if pipe.rate < math.inf:
                pipe.free = pipe.unused if pipe.unused > _NO_CAPACITY * pipe.rate else 0.0
        self._update()

    def _update(self) -> None:
        """Plan a check for the end of the first transfer, too. One that comes too early does no harm."""
        for path in self._changed:
            path.count()
        self._changed.clear()
        share_out(self._paths.values(), self._pipes)
        for path in self._paths.values():
            while path.at_cap < len(path.caps) and path.caps[path.at_cap] <= path.level:
                path.at_cap += 1
                self._switch(path.claims[path.at_cap - 1], is_at_cap=True)
            while path.at_cap and path.caps[path.at_cap - 1] > path.level:
                path.at_cap -= 1
                self._switch(path.claims[path.at_cap], is_at_cap=False)
        remaining = self._remaining()
        if remaining == math.inf:
            return
        at = self._events.now + from_seconds(max(0.0, remaining))
        if self._check_at is None or at < self._check_at:
            self._check_at = at
            self._events.plan(at, LINK, 0, functools.partial(self._check, at))

    def _switch(self, one: _Class, *, is_at_cap: bool) -> None:
        one.served = one.served_by(self._events.now)
        one.is_at_cap = is_at_cap
        one.since = self._events.now if is_at_cap else one.path.served
        self._set_end(one)

    def _check(self, at: Nanoseconds) -> None:
        if at != self._check_at:  # an earlier check was planned in its place
            return
        self._check_at = None
        self._progress()
        done: list[Transfer] = []
        for path in list(self._paths.values()):
            least = path.level * _NANOSECOND
            while (one := self._first(path.ends, is_at_cap=False)) and one.end - path.served <= least:
                done.append(self._finish(one))
            for one in list(path.bursts):
                while one.count and self._burst_remaining(one) <= _NANOSECOND:
                    transfer = heapq.heappop(one.tokens)[2]
                    self._join(transfer, self._quit(transfer), 0.0)
        while (one := self._first(self._at_cap, is_at_cap=True)) and one.end <= at + 1:
            done.append(self._finish(one))
        self._update()
        for transfer in sorted(done, key=lambda each: each.number):
            transfer.on_done()

    def _finish(self, one: _Class) -> Transfer:
        transfer = one.order[0][2]
        self._count(transfer, transfer.end)
        self._quit(transfer)
        return transfer


def _take_saved(path: Sequence[Pipe], most: float) -> float:
    """Take the bits that all limited pipes have saved. Return how many: at most `most`, 0 if none is
    limited."""
    limited = [pipe for pipe in path if pipe.rate < math.inf]
    bits = min(max(0.0, most), *(pipe.saved for pipe in limited)) if limited else 0.0
    if bits:
        for pipe in limited:
            pipe.saved -= bits
    return bits


def _count_bits(path: Sequence[Pipe], device: str | None, bits: float) -> None:
    """`device`: None for background traffic."""
    for pipe in path if bits else ():
        if device is None:
            pipe.background_bits += bits
        else:
            pipe.devices_bits[device] = pipe.devices_bits.get(device, 0.0) + bits
