"""Max-min fair rates over a tree of shared links, in virtual time.

A transfer passes all pipes from its device to the server, and may have a limit of its own. Rates are
max-min fair (`agents.links.max_min`) at each moment. They are computed again when a transfer begins or
ends, and when a pipe changes.

Transfers with the same path and the same limit always have the same rate. They form a class, and a class
needs one sum only: the bits that each of its transfers would have sent since the class began. The cost
of an event therefore grows with the number of classes, and only logarithmically with that of transfers.

Traffic that does not react to congestion (`set_fixed`) takes its rate before the transfers share the
rest. If a pipe is too small for it, it shares the pipe max-min fairly among itself.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

from agents.links.max_min import RateClaim, SharedLimit, share_out
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from testbed.virtual.event_queue import LINK, EventQueue

_NANOSECOND = 1e-9
"""One nanosecond, in seconds. A transfer that needs at most this time counts as finished."""
_NO_CAPACITY = 1e-9
"""Share of a pipe's rate. What is left of the rate counts as 0 below this share, because it is a
rounding error."""


class Pipe(SharedLimit):
    """A shared link in one direction. `free` is the rest of its rate beside the fixed traffic."""

    __slots__ = ("background_bits", "bucket", "devices_bits", "rate", "saved")

    def __init__(self, rate: float = math.inf) -> None:
        super().__init__(rate)
        self.rate = rate
        """Rate in bit/s; infinite if it is not limited, 0 while nothing passes. Set by
        `FairShares.set_rate`."""
        self.bucket = self.saved = 0.0
        """Size of the pipe's token bucket, and its content, in bits. The unused rate fills it, and bits
        of new transfers empty it. Set by `FairShares.set_rate`."""
        self.devices_bits: dict[str, float] = {}
        """Bits of each device that have passed since the use was last read."""
        self.background_bits = 0.0
        """Bits of the background traffic that have passed since the use was last read."""


class _Class(RateClaim[Pipe]):
    """Transfers with the same path and limit."""

    __slots__ = ("drained", "number", "order", "own", "served", "tokens")

    def __init__(self, path: tuple[Pipe, ...], own: float, number: int, *, is_burst: bool) -> None:
        super().__init__(path, math.inf if is_burst else own, 0)
        self.own = own
        """Own limit of each transfer in bit/s; infinite if there is none."""
        self.number = number
        self.served = 0.0
        """Bits that each transfer would have sent since the class began."""
        self.order: list[tuple[float, int, Transfer]] = []
        """Heap of (end, number, transfer): the value of `served` at which the transfer has passed.
        Transfers that have left may still be in it."""
        self.drained = 0.0
        """Bits that each transfer would have taken out of its token bucket since the class began."""
        self.tokens: list[tuple[float, int, Transfer]] = []
        """Heap of (end, number, transfer) as `order`: the value of `drained` at which the bucket is
        empty. Empty unless the transfers of the class have tokens."""


class Transfer:
    """A transfer in progress."""

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
        """Name of the device; None for background traffic."""
        self.on_done = on_done
        self.in_class: _Class | None = None
        self.end = 0.0
        """Value of the class's `served` at which the transfer has passed."""
        self.mark = 0.0
        """Value of the class's `served` up to which the transfer's bits were counted."""


class FairShares:
    """Transfers over pipes that form one tree, in one direction."""

    def __init__(self, queue: EventQueue) -> None:
        self._events = queue
        self._pipes: list[Pipe] = []
        self._classes: dict[tuple[tuple[Pipe, ...], float, bool], _Class] = {}
        self._by_cap: list[_Class] = []
        """Classes in the order of their caps, then of their numbers."""
        self._fixed: dict[object, RateClaim[Pipe]] = {}
        """Traffic that does not react to congestion, by its source."""
        self._numbers = itertools.count()
        self._since: Nanoseconds = 0
        self._check_at: Nanoseconds | None = None
        """Time of the next planned check, in nanoseconds; None if no check is planned."""

    def add(self, pipe: Pipe) -> Pipe:
        """Add a pipe to the tree."""
        self._pipes.append(pipe)
        return pipe

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is in progress."""
        return not self._by_cap

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
        """Begin a transfer of `bits` bits through the pipes of `path`. The bits for which all buckets on
        the path have tokens pass at once.

        Some pipe, or `own`, must be limited. `own`: the transfer's own limit in bit/s. `tokens`: bits
        that pass without this limit. `device`: name of the device, None for background traffic.
        `on_done`: called when all bits have passed.
        """
        self._progress()
        transfer = Transfer(path, own, next(self._numbers), device, on_done)
        at_once = _take_saved(path, min(bits, tokens) if own < math.inf else bits)
        _count_bits(path, device, at_once)
        self._join(transfer, bits - at_once, tokens - at_once)
        self._update()
        return transfer

    def leave(self, transfer: Transfer) -> float:
        """End a transfer that has not passed yet; return the number of bits that it has not sent."""
        self._progress()
        left = self._quit(transfer)
        self._update()
        return left

    def set_rate(self, pipe: Pipe, rate: float, bucket: float = 0.0) -> None:
        """Change the rate of `pipe`, in bit/s. 0 lets nothing pass. `bucket`: size of its token bucket,
        in bits."""
        if rate != pipe.rate:
            self._progress()
            pipe.rate = rate
            pipe.saved = bucket if not pipe.bucket else min(pipe.saved, bucket)
            pipe.bucket = bucket
            self._update_fixed()

    def set_fixed(self, source: object, path: tuple[Pipe, ...], rate: float) -> None:
        """Set the rate that `source` sends through the pipes of `path` without regard to congestion, in
        bit/s."""
        self._progress()
        if rate:
            self._fixed[source] = RateClaim(path, rate)
        else:
            self._fixed.pop(source, None)
        self._update_fixed()

    def count_use(self) -> None:
        """Count all bits that have passed until now in the pipes."""
        self._progress()
        for one in self._by_cap:
            for end, _, transfer in one.order:
                if transfer.in_class is one and transfer.end == end:
                    self._count(transfer, one.served)

    # Transfers

    def _join(self, transfer: Transfer, bits: float, tokens: float) -> None:
        is_burst = tokens > 0 and transfer.own < math.inf
        key = transfer.path, transfer.own, is_burst
        found = self._classes.get(key)
        if found is None:
            found = _Class(transfer.path, transfer.own, next(self._numbers), is_burst=is_burst)
            self._classes[key] = found
            bisect.insort(self._by_cap, found, key=lambda one: (one.cap, one.number))
        transfer.in_class, transfer.mark = found, found.served
        transfer.end = found.served + bits
        found.count += 1
        heapq.heappush(found.order, (transfer.end, transfer.number, transfer))
        if is_burst:
            heapq.heappush(found.tokens, (found.drained + tokens, transfer.number, transfer))

    def _quit(self, transfer: Transfer) -> float:
        """Take the transfer out of its class; return its remaining bits."""
        found = transfer.in_class
        if found is None:
            return 0.0
        left = max(0.0, transfer.end - found.served)
        self._count(transfer, found.served)
        transfer.in_class = None
        found.count -= 1
        if not found.count:
            del self._classes[found.path, found.own, found.cap > found.own]
            self._by_cap.remove(found)
        return left

    @staticmethod
    def _count(transfer: Transfer, upto: float) -> None:
        """Count the bits of the transfer since they were last counted. `upto`: value of the class's
        `served`."""
        bits = min(upto, transfer.end) - transfer.mark
        if bits <= 0:
            return
        transfer.mark += bits
        _count_bits(transfer.path, transfer.device, bits)

    # Rates

    def _progress(self) -> None:
        """Let all traffic pass that could pass until now."""
        elapsed = to_seconds(self._events.now - self._since)
        self._since = self._events.now
        if not elapsed:
            return
        for one in self._by_cap:
            one.served += one.rate * elapsed
            if one.tokens:
                one.drained += max(0.0, one.rate - one.own) * elapsed
        for fixed in self._fixed.values():
            for pipe in fixed.path:
                pipe.background_bits += fixed.rate * elapsed
        for pipe in self._pipes:
            if pipe.saved < pipe.bucket:
                pipe.saved = min(pipe.bucket, pipe.saved + pipe.left * elapsed)

    def _update_fixed(self) -> None:
        """Compute the rates of the fixed traffic, then those of the transfers."""
        for pipe in self._pipes:
            pipe.free = pipe.rate
        if self._fixed:
            fixed = sorted(self._fixed.values(), key=lambda one: one.cap)
            share_out(fixed, self._pipes)
            for pipe in self._pipes:
                if pipe.rate < math.inf:
                    pipe.free = pipe.left if pipe.left > _NO_CAPACITY * pipe.rate else 0.0
        self._update()

    def _update(self) -> None:
        """Compute the rates of the transfers, and plan a check for the time at which the first transfer
        will have passed. A check that comes too early does no harm."""
        share_out(self._by_cap, self._pipes)
        remaining = min(map(self._remaining, self._by_cap), default=math.inf)
        if remaining == math.inf:
            return
        at = self._events.now + from_seconds(max(0.0, remaining))
        if self._check_at is None or at < self._check_at:
            self._check_at = at
            self._events.plan(at, LINK, 0, functools.partial(self._check, at))

    def _remaining(self, one: _Class) -> float:
        """Return the seconds until the first transfer of the class has passed or has no tokens left;
        infinite if nothing passes."""
        ends, tokens = one.order, one.tokens
        while ends[0][2].in_class is not one:
            heapq.heappop(ends)
        left = ends[0][0] - one.served
        if not one.rate:
            return math.inf if left > 0 else 0.0
        first = left / one.rate
        if tokens and one.rate > one.own:
            while tokens[0][2].in_class is not one:  # a transfer of the class is in both heaps
                heapq.heappop(tokens)
            first = min(first, (tokens[0][0] - one.drained) / (one.rate - one.own))
        return first

    def _check(self, at: Nanoseconds) -> None:
        if at != self._check_at:  # an earlier check was planned in its place
            return
        self._check_at = None
        self._progress()
        done: list[Transfer] = []
        for one in list(self._by_cap):
            while one.count and self._remaining(one) <= _NANOSECOND:
                transfer = one.order[0][2]
                if transfer.end - one.served <= one.rate * _NANOSECOND:
                    heapq.heappop(one.order)
                    self._count(transfer, transfer.end)
                    self._quit(transfer)
                    done.append(transfer)
                else:  # its bucket is empty
                    transfer = heapq.heappop(one.tokens)[2]
                    self._join(transfer, self._quit(transfer), 0.0)
        self._update()
        for transfer in sorted(done, key=lambda each: each.number):
            transfer.on_done()


def _take_saved(path: Sequence[Pipe], most: float) -> float:
    """Take the bits that all limited pipes of `path` have saved out of their buckets. Return how many
    bits these are: at most `most`, and 0 if no pipe is limited."""
    limited = [pipe for pipe in path if pipe.rate < math.inf]
    bits = min(max(0.0, most), *(pipe.saved for pipe in limited)) if limited else 0.0
    if bits:
        for pipe in limited:
            pipe.saved -= bits
    return bits


def _count_bits(path: Sequence[Pipe], device: str | None, bits: float) -> None:
    """Count bits of `device`, or of background traffic if it is None, in the pipes of `path`."""
    for pipe in path if bits else ():
        if device is None:
            pipe.background_bits += bits
        else:
            pipe.devices_bits[device] = pipe.devices_bits.get(device, 0.0) + bits
