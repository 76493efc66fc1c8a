"""Background traffic of a shared link: rates and transfers of other people, and their schedule in real
time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from agents import random_generators
from agents.config import Background, DrawnDuration
from agents.device.link_measurement import PACKET
from agents.timing.durations import DISTRIBUTIONS, DurationDistribution, sampler

# Background traffic of a shared link: rates and transfers of other people, drawn from a generator.
#
# `constant`, `on_off` and `trace` are rates that do not react to congestion. `flows` are transfers that
# arrive at random and share the link with the devices. A loop that sends them asks
# `agents.links.background`. To add a kind, write a dataclass here, add it to KINDS, and write its
# settings in `testbed.segments.schema`.
#
# All times and rates are in device time. Nothing here reads a clock.

RateChange = tuple[float, float]
"""Seconds, and bit/s from then on."""
Transfer = tuple[float, float]
"""Seconds at which a transfer begins, and bytes."""
LEAST_CYCLE_S = 0.01
"""Minimum mean of an on and an off period together."""
MOST_ARRIVALS = 1000.0
"""Transfers per second."""


@dataclass(frozen=True)
class ConstantRate:
    rate: float
    """bit/s."""

    def rates(self, rng: np.random.Generator) -> Iterator[RateChange]:
        yield 0.0, self.rate


@dataclass(frozen=True)
class OnOff:
    """`rate` during on periods, nothing during off periods, which come first."""

    rate: float
    """bit/s."""
    on: DrawnDuration
    off: DrawnDuration

    def __post_init__(self) -> None:
        mean = _distribution(self.on).expectation + _distribution(self.off).expectation
        if mean < LEAST_CYCLE_S:
            raise ValueError(
                f"on and off last {mean:g} s together on average, expected at least {LEAST_CYCLE_S:g} s"
            )

    def rates(self, rng: np.random.Generator) -> Iterator[RateChange]:
        on, off = sampler(self.on, rng), sampler(self.off, rng)
        at = 0.0
        while True:
            yield at, 0.0
            at += off()
            yield at, self.rate
            at += on()


@dataclass(frozen=True)
class TracedRate:
    """Rates over time, from a file."""

    times: Sequence[float]
    """Seconds, increasing from 0."""
    rates_at: Sequence[float]
    """bit/s from each of `times` on."""
    period: float | None
    """Seconds after which the trace repeats; None if the last rate stays."""

    def rates(self, rng: np.random.Generator) -> Iterator[RateChange]:
        for number in itertools.count():
            for at, rate in zip(self.times, self.rates_at, strict=True):
                yield number * (self.period or 0.0) + at, rate
            if self.period is None or len({*self.rates_at}) == 1:  # of one direction, no change follows
                return


@dataclass(frozen=True)
class Flows:
    """Poisson process. Each transfer sends as fast as the link lets it."""

    arrivals: float
    """Mean per second."""
    size: DrawnDuration
    """Distribution of the sizes, with bytes in place of seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.arrivals <= MOST_ARRIVALS:
            raise ValueError(f"found {self.arrivals:g} arrivals/s, expected up to {MOST_ARRIVALS:g}/s")

    def transfers(self, rng: np.random.Generator) -> Iterator[Transfer]:
        size, at = sampler(self.size, rng), 0.0
        while True:
            at += float(rng.exponential(1 / self.arrivals))
            yield at, max(1.0, size())

    @property
    def mean_rate(self) -> float:
        """bit/s; infinite if the size has no finite mean."""
        return 8 * self.arrivals * _distribution(self.size).expectation


KINDS: dict[str, type[ConstantRate | OnOff | TracedRate | Flows]] = {
    "constant": ConstantRate,
    "on_off": OnOff,
    "trace": TracedRate,
    "flows": Flows,
}


def build(background: Background) -> ConstantRate | OnOff | TracedRate | Flows:
    """Raises ValueError if the parameters are invalid."""
    try:
        return msgspec.convert(background.params, KINDS[background.kind])
    except KeyError:
        raise ValueError(f"found {background.kind!r}, expected one of {', '.join(KINDS)}") from None


def rates(background: Background, seed: int, segment: str) -> Iterator[RateChange]:
    """Changes of a rate that does not react to congestion, in the order of time, from time 0. `seed`: of
    the run."""
    kind = build(background)
    if isinstance(kind, Flows):
        raise TypeError("flows have transfers, not rates")
    last = math.nan
    for at, rate in kind.rates(_generator(background, seed, segment)):
        if rate != last:
            yield at, rate
        last = rate


def transfers(background: Background, seed: int, segment: str) -> Iterator[Transfer]:
    """Transfers of the kind `flows`, in the order of time. `seed`: of the run."""
    kind = build(background)
    if not isinstance(kind, Flows):
        raise TypeError(f"{background.kind} has a rate, not transfers")
    return kind.transfers(_generator(background, seed, segment))


def is_flows(background: Background) -> bool:
    """Transfers share the link with the devices."""
    return KINDS[background.kind] is Flows


def _generator(background: Background, seed: int, segment: str) -> np.random.Generator:
    purpose = f"background {background.way} {background.number}"
    return random_generators.generator(seed, segment, purpose)


def _distribution(drawn: DrawnDuration) -> DurationDistribution:
    return DISTRIBUTIONS[drawn.distribution](**drawn.params)


# Schedule of background traffic in real time: sizes, and when to send them. Neither I/O nor a clock: the
# time is an argument.
#
# A loop sends the traffic of a source like this:
#
#     source = schedule(traffic, seed, segment, epoch=epoch, dilation=dilation, now=now)
#     while the loop runs:
#         wait until source.next
#         for size in source.take(now): send size bytes
#
# All times are seconds of a monotonic clock; traffic itself is in device time.

_TICK_SECONDS = 0.002
"""Minimum between two moments at which traffic of a given rate is sent."""
_ROUNDING_BYTES = 1e-3
"""May be missing from a packet, because times are rounded."""
_MAX_BEHIND_SECONDS = 0.05
"""Traffic of a given rate that is not sent in time is made up for if it is at most this late."""
_MAX_LATE_SECONDS = 1.0
"""Transfers that should have begun longer ago, such as before the start of a resumed run, are left
out."""


class RateSchedule:
    """A given rate, in full packets."""

    def __init__(self, changes: Iterator[RateChange], epoch: float, dilation: float, now: float) -> None:
        """`epoch`: the run's start. `dilation`: host seconds per second of device time."""
        self._changes = ((epoch + at * dilation, rate / 8 / dilation) for at, rate in changes)
        self._change = next(self._changes, None)
        """Time, and new rate in bytes per second."""
        self._rate = 0.0
        """Bytes per second."""
        self._owed = 0.0
        """Bytes that are due at the time `_at` but not sent."""
        self._at = self.next = now
        """`next`: when to call `take` again; infinite if nothing more is sent."""

    def take(self, now: float) -> Sequence[int]:
        """Bytes on the wire to send now: one size, or none."""
        at = self._at + max(0.0, now - self.next - _MAX_BEHIND_SECONDS)
        while self._change is not None and self._change[0] <= now:
            changes, rate = self._change
            self._owed += max(0.0, changes - at) * self._rate
            at, self._rate = max(at, changes), rate
            self._change = next(self._changes, None)
        self._owed += (now - at) * self._rate
        self._at = now
        size = int((self._owed + _ROUNDING_BYTES) // PACKET) * PACKET
        self._owed -= size
        full = now + (PACKET - self._owed) / self._rate if self._rate else math.inf
        change = math.inf if self._change is None else self._change[0]
        self.next = min(max(now + _TICK_SECONDS, full), change)
        return [size] if size else []


class TransferSchedule:
    def __init__(self, transfers: Iterator[Transfer], epoch: float, dilation: float) -> None:
        """`epoch`: the run's start. `dilation`: host seconds per second of device time."""
        self._transfers = ((epoch + at * dilation, round(size)) for at, size in transfers)
        self.next, self._size = next(self._transfers, (math.inf, 0))
        """`next`: when the next transfer begins; infinite if there is none."""

    def take(self, now: float) -> Sequence[int]:
        """Bytes of the transfers that have to begin now."""
        found = []
        while self.next <= now:
            if self.next > now - _MAX_LATE_SECONDS:
                found.append(self._size)
            self.next, self._size = next(self._transfers, (math.inf, 0))
        return found


def schedule(
    traffic: Background, seed: int, segment: str, *, epoch: float, dilation: float, now: float
) -> RateSchedule | TransferSchedule:
    """`seed`: of the run. `epoch`: its start. `dilation`: host seconds per second of device time."""
    if is_flows(traffic):
        return TransferSchedule(transfers(traffic, seed, segment), epoch, dilation)
    return RateSchedule(rates(traffic, seed, segment), epoch, dilation, now)
