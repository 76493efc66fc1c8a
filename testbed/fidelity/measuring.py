"""Measurement of fidelity: comparison of the resources requested for each device with the measured ones.

CPU. A device that waits for the network rightly uses less than its share. So the share is measured only
in intervals (between two samples) in which the device demanded more CPU than it had. An interval counts
if it shows one of two signs: - The kernel throttled the device in nearly all CFS periods in which the
device ran. The measured share is the CPU seconds divided by the seconds of these periods, so pauses
between them do not count. - The device trained nearly all the time, according to the records of its
updates. The measured share is the CPU seconds divided by the seconds of the interval. If a host has less
CPU than requested, no device is throttled, and only the second sign appears. The same is true of the
`process` runtime, which has no throttling counters.

Unnoticed pauses make the measured share too small: by a few per cent, at most by 10 %. A device without
either sign was never busy, and its measured share is None.

A device that is not busy is judged by its demand. The kernel counts how long the client's thread ran,
and how long it wanted to run but could not (throttled, suspended, or waiting for a core). The CPU
seconds divided by the sum of both times are the share that the device got while it wanted to run. Under
a quota this share is the requested one, or more if short bursts fit into the quota. It is less only if
other processes took the CPU.

Limits. A device's init reads the limits of its container from the kernel at the start and after each
change. Each limit must be as requested.

Links. Probes measure the links before the run. During the run, the bytes that leave a link's queue while
packets wait are compared with the bytes that the link's rate allows (`agents.device.link_measurement`).
The duration of a transfer says less, because it includes waiting for the client and the aggregator.

If a request changed during the run, each phase is measured separately, and the worst phase is the
device's figure. Times are in seconds of device time. CPU shares are shares of one host core. Rates are
in bit/s.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from agents.wire import messages
from agents.wire.messages import CgroupLimits, MessageError
from testbed.fidelity.figures import (
    CPU,
    DELAYS,
    ENOUGH_DEMAND_SECONDS,
    ENOUGH_SECONDS,
    RATES,
    Carried,
    DeviceFidelity,
    Fidelity,
    Figure,
    Interval,
    Requested,
    RequestedCpu,
    RequestedLimits,
    RequestedLink,
    differences,
)
from testbed.fidelity.part import LegClock
from testbed.fidelity.validity import TrainingSpan

_THROTTLED_SHARE = 0.9
"""Minimum share of throttled periods, among those in which a device ran, to count as busy. Below 1
because the quota is not used up in the first and last period of a piece of work."""
_TRAINED_SHARE = 0.95
"""Minimum share of an interval spent in training to count as busy. Below 1 because a client waits for a
moment between two trainings."""
_SETTLE_SECONDS = 0.5
"""Seconds from setting a limit until it is in effect."""

_LIMITS_SETTLE_SECONDS = 3.0
"""Before and after a change, readings of limits are not compared for this time. A device's init reads
them once a second; on a slow host the kernel may have new limits some time before the engine confirms
them."""
_INSTANT_SECONDS = 1e-6
_SLOW_SHARE, _SLOW_SECONDS = 0.9, 2.0
"""A link is slow if it carries less than this share of its rate for this many seconds while packets
wait."""
_WAITED_SHARE = 0.9
"""Packets count as waiting all the time between two samples if they waited for at least this share of
the time."""
_LINKS = {"up": "uplink", "down": "downlink"}

_LARGEST_VALUE = 1e18
"""Upper bound of the numbers in a valid sample."""

_Coverage = Callable[[float, float], float]


def measure(
    requested: Iterable[Requested],
    samples: Iterable[Mapping[str, Any]],
    clock: LegClock,
    trainings: Mapping[str, Sequence[TrainingSpan]],
) -> Fidelity:
    """Compare the requested resources with the measured ones.

    `samples`: telemetry (`agents.device.control_group`), probes of links, and limits, in any order.
    Values that are not numbers are ignored.

    A sample with the key `probe` is a probe of a link. It may have `up` and `down` (bit/s on the wire),
    `rtt` and `jitter` (median and standard deviation of the round-trip times, in seconds), and `loss`
    (share of lost round trips). A probe before `clock.begin` belongs to the first requested link, and
    only the last of them counts, because wrong ones are repeated. A sample with the key `limits` has the
    limits of the device's control group from that time on.
    """
    usage: dict[str, list[_UsageAt]] = {}
    probes: dict[str, list[_LinkProbeAt]] = {}
    limits: dict[str, list[_LimitsAt]] = {}
    queues: dict[tuple[str, str], list[_QueueAt]] = {}
    for sample in samples:
        at, name = number(sample, "at"), sample.get("device")
        if at is None or not isinstance(name, str) or (when := at - clock.epoch) > clock.end:
            continue
        if isinstance(probe := sample.get("probe"), Mapping):
            if when < clock.begin:  # of the first requested link, also in a resumed run; the last counts
                probes[name] = [_LinkProbeAt(-math.inf, probe)]
            else:
                probes.setdefault(name, []).append(_LinkProbeAt(when, probe))
        elif "limits" in sample:
            with suppress(MessageError):
                read = _LimitsAt(when, messages.of_telemetry(messages.CgroupLimits, sample["limits"]))
                limits.setdefault(name, []).append(read)
        elif when >= clock.begin and (cpu := number(sample, "cpu")) is not None:
            counters = (number(sample, key) or 0.0 for key in ("periods", "throttled_periods"))
            demand = (number(sample, key) for key in ("ran", "waited"))
            usage.setdefault(name, []).append(_UsageAt(when, cpu, *counters, *demand))
            for way, key in _LINKS.items():
                if (queue := _queue(when, sample.get(key))) is not None:
                    queues.setdefault((name, way), []).append(queue)
    devices = []
    for one in requested:
        used = sorted(usage.get(one.device, ()), key=lambda sample: sample.at)
        trained = _coverage((each.begin, each.end) for each in trainings.get(one.device, ()))
        found = _device(one, used, probes.get(one.device, ()), trained, clock)
        if one.cpu[0].limits is not None:
            known = sorted(limits.get(one.device, ()), key=lambda each: each.at)
            wrong = tuple(dict.fromkeys(_wrong_limits(one, known, clock)))
            unread = _unread_limits(one.cpu[0].limits, known)
            found = replace(found, wrong_limits=wrong, unread_limits=unread)
        looked = {way: queues.get((one.device, way)) for way in _LINKS}
        carried = {way: _carried_traffic(known) for way, known in looked.items() if known is not None}
        devices.append(replace(found, carried=carried))
    return Fidelity(tuple(devices))


class _UsageAt(NamedTuple):
    """CPU counters of a device."""

    at: float
    cpu: float
    """CPU seconds that the device used."""
    periods: float
    """CFS periods in which the device ran."""
    throttled: float
    ran: float | None
    """Seconds in which the client's thread was on a CPU; None if unknown."""
    waited: float | None
    """Seconds in which the client's thread waited for a CPU; None if unknown."""


class _QueueAt(NamedTuple):
    at: float
    busy: float
    """Seconds in which packets waited."""
    left: float
    """Bytes that left the queue while packets waited."""
    allowed: float
    """Bytes that the link's rate allows in the time `busy`."""


class _LimitsAt(NamedTuple):
    at: float
    limits: CgroupLimits


class _LinkProbeAt(NamedTuple):
    at: float
    values: Mapping[str, Any]


def _device(
    requested: Requested,
    usage: Sequence[_UsageAt],
    probes: Sequence[_LinkProbeAt],
    trained: _Coverage,
    clock: LegClock,
) -> DeviceFidelity:
    away = _coverage((begin, end + _SETTLE_SECONDS) for begin, end in requested.away)
    phases = _phases(requested, usage, trained, away)
    end = clock.end if math.isfinite(clock.end) else usage[-1].at if usage else clock.begin
    busy = _worst([phase.busy for phase in phases], ENOUGH_SECONDS, lambda one: one.figure.distance)
    demand = _worst(  # a share above the requested one is no error
        [phase.demand for phase in phases], ENOUGH_DEMAND_SECONDS, lambda one: -(one.figure.error or 0.0)
    )
    counted = any(_wanted_seconds(a, b) is not None for a, b in pairwise(usage))
    return DeviceFidelity(
        requested.device,
        requested.group,
        {
            CPU: busy.figure,
            **{name: _link_figure(name, requested.link, probes) for name in (*RATES, *DELAYS)},
        },
        measured=busy.seconds,
        demand=demand.figure,
        wanted=demand.seconds if counted else None,
        present=max(0.0, end - clock.begin - away(clock.begin, end)),
        observed=sum(phase.observed for phase in phases),
        used=_used_share(usage),
        probes=len(probes),
        round_trips=int(sum(number(probe.values, "round_trips") or 0 for probe in probes)),
        node=requested.node,
    )


def _wrong_limits(requested: Requested, read: Sequence[_LimitsAt], clock: LegClock) -> Iterator[str]:
    """Yield a text for each. Limits are checked at each reading, and some seconds after each request and
    absence, because a request without any effect causes no reading."""
    away = _coverage((begin, end + _LIMITS_SETTLE_SECONDS) for begin, end in requested.away)
    changes = [max(one.at, clock.begin) for one in requested.cpu] + [end for _, end in requested.away]
    settled = (at + _LIMITS_SETTLE_SECONDS + _INSTANT_SECONDS for at in changes)
    times = [*settled, *(each.at for each in read)]
    for at in sorted(times):
        phase = bisect_right(requested.cpu, at, key=lambda one: one.at) - 1
        index = bisect_right(read, at, key=lambda each: each.at) - 1
        if index < 0 or not clock.begin <= at <= clock.end or away(at - _INSTANT_SECONDS / 2, at):
            continue
        nearest = requested.cpu[max(phase, 1) : phase + 2]  # changes that may be in progress
        if not any(abs(at - change.at) < _LIMITS_SETTLE_SECONDS for change in nearest):
            wanted = requested.cpu[phase].limits
            assert wanted is not None  # noqa: S101
            yield from differences(wanted, read[index].limits)


def _unread_limits(requested: RequestedLimits, read: Sequence[_LimitsAt]) -> str | None:
    if not read:
        return "its limits: they were never read from the kernel"
    if requested.memory is not None and read[-1].limits.swap is None:
        return "its swap: this host has swap, and its kernel cannot limit it"
    return None


def _queue(at: float, fields: object) -> _QueueAt | None:
    if not isinstance(fields, Mapping):
        return None
    values = [number(fields, key) for key in ("busy", "left", "allowed")]
    known = [value for value in values if value is not None]
    return _QueueAt(at, *known) if len(known) == len(values) else None


def _carried_traffic(queues: Iterable[_QueueAt]) -> Carried:
    """Sum up the traffic, and find the worst period in which the link was too slow."""
    busy = left = allowed = 0.0
    slow: tuple[float, float, float] | None = None
    stretch: list[tuple[_QueueAt, _QueueAt]] = []
    for before, after in pairwise(sorted(queues, key=lambda queue: queue.at)):
        waited = after.busy - before.busy
        if waited < 0:  # the device restarted, which reset its counters
            stretch = []
            continue
        busy += waited
        left += after.left - before.left
        allowed += after.allowed - before.allowed
        if waited < _WAITED_SHARE * (after.at - before.at):
            stretch = []
            continue
        stretch.append((before, after))
        while stretch and after.busy - stretch[0][1].busy >= _SLOW_SECONDS:
            del stretch[0]  # the rest of the stretch is long enough
        first = stretch[0][0]
        if after.busy - first.busy >= _SLOW_SECONDS and after.allowed > first.allowed:
            share = (after.left - first.left) / (after.allowed - first.allowed)
            if share < _SLOW_SHARE and (slow is None or share < slow[2]):
                # A wait for one packet counts when it leaves, perhaps seconds after the wait began.
                slow = min(first.at, after.at - (after.busy - first.busy)), after.at, share
    return Carried(busy, left / allowed if allowed else None, slow)


def _used_share(usage: Sequence[_UsageAt]) -> float | None:
    """Share of one core; None for fewer than two samples."""
    if len(usage) < 2 or usage[-1].at <= usage[0].at:
        return None
    cpu = sum(b.cpu if _has_restarted(a, b) else b.cpu - a.cpu for a, b in pairwise(usage))
    return cpu / (usage[-1].at - usage[0].at)


def _has_restarted(before: _UsageAt, after: _UsageAt) -> bool:
    """A restart resets the device's counters to 0."""
    return after.cpu < before.cpu or after.periods < before.periods


@dataclass(slots=True)
class _Cpu:
    """CPU seconds of a device within `seconds`, and its requested share."""

    requested: float | None
    cpu: float = 0.0
    seconds: float = 0.0

    def add(self, cpu: float, seconds: float) -> None:
        if seconds > 0:
            self.cpu += cpu
            self.seconds += seconds

    @property
    def figure(self) -> Figure:
        return Figure(self.requested, self.cpu / self.seconds if self.seconds else None)


@dataclass(slots=True)
class _Phase:
    """Time in which the requested share did not change."""

    busy: _Cpu
    """While the device demanded more than its share."""
    demand: _Cpu
    """While the client ran or waited for a CPU."""
    observed: float = 0.0
    """Seconds that telemetry covers."""


def _phases(
    requested: Requested, usage: Sequence[_UsageAt], trained: _Coverage, away: _Coverage
) -> list[_Phase]:
    phases = [_Phase(_Cpu(one.share), _Cpu(one.share)) for one in requested.cpu]
    for before, after in pairwise(usage):
        index = _phase(requested.cpu, before.at, after.at)
        if index is None or _has_restarted(before, after) or away(before.at, after.at):
            continue
        phase, cpu = phases[index], after.cpu - before.cpu
        phase.observed += after.at - before.at
        period = requested.cpu[index].period
        phase.busy.add(cpu, _busy_seconds(before, after, period, trained(before.at, after.at)))
        if (wanted := _wanted_seconds(before, after)) is not None:
            phase.demand.add(cpu, wanted)
    return phases


def _worst(phases: Sequence[_Cpu], enough: float, error: Callable[[_Cpu], float]) -> _Cpu:
    """Largest `error` among the phases of at least `enough` seconds; the longest phase if there is
    none."""
    sufficient = [one for one in phases if one.seconds >= enough]
    return max(sufficient, key=error) if sufficient else max(phases, key=lambda one: one.seconds)


def _wanted_seconds(before: _UsageAt, after: _UsageAt) -> float | None:
    """Seconds in which the client ran or waited for a CPU; None if unknown."""
    if before.ran is None or before.waited is None or after.ran is None or after.waited is None:
        return None
    if after.ran < before.ran:  # the client was restarted
        return None
    wanted = after.ran - before.ran + after.waited - before.waited
    return min(wanted, after.at - before.at)  # a process may be suspended while it waits for a core


def _busy_seconds(before: _UsageAt, after: _UsageAt, period: float | None, trained: float) -> float:
    """Seconds in which the device demanded more CPU than it had; 0 if no counter shows it."""
    periods = after.periods - before.periods
    # Without earlier periods, the limit may have been set within the interval, after a restart.
    throttled = before.periods and after.throttled - before.throttled >= _THROTTLED_SHARE * periods
    if period is not None and periods and throttled:
        # The clock is not used: a throttled device may read it a period before it reads its counters.
        return periods * period
    seconds = after.at - before.at
    return seconds if trained >= _TRAINED_SHARE * seconds else 0.0


def _phase(
    requested: Sequence[RequestedCpu] | Sequence[RequestedLink], begin: float, end: float
) -> int | None:
    """Index of the request in effect from `begin` to `end`; None if there is no single one."""
    index = bisect_right(requested, begin, key=lambda one: one.at) - 1
    if index < 0 or (index > 0 and begin < requested[index].at + _SETTLE_SECONDS):
        return None
    changed = index + 1 < len(requested) and requested[index + 1].at < end
    return None if changed else index


def _link_figure(
    name: str, requested: Sequence[RequestedLink], probes: Sequence[_LinkProbeAt]
) -> Figure:
    """The worst phase, each by the median of its probes, because the run's traffic may disturb a
    probe."""
    phases = requested or (RequestedLink(),)
    values: dict[int, list[float]] = {}
    for probe in probes:
        at = max(probe.at, phases[0].at)
        value, phase = number(probe.values, name), _phase(phases, at, at)
        if value is not None and phase is not None:
            values.setdefault(phase, []).append(value)
    if not values:
        return Figure(phases[0].figures()[name])
    figures = [Figure(phases[phase].figures()[name], median(got)) for phase, got in values.items()]
    return max(figures, key=lambda figure: figure.distance)


def _coverage(intervals: Iterable[Interval]) -> _Coverage:
    """Return a function from begin and end to the seconds between them that `intervals` cover. Overlaps
    count once."""
    begins: list[float] = []
    ends: list[float] = []
    total: list[float] = []  # seconds covered before each begin
    for begin, end in sorted(interval for interval in intervals if not math.isnan(sum(interval))):
        begin = max(begin, ends[-1]) if ends else begin
        if end > begin:
            total.append(total[-1] + ends[-1] - begins[-1] if ends else 0.0)
            begins.append(begin)
            ends.append(end)

    def until(at: float) -> float:
        index = bisect_right(begins, at) - 1
        return total[index] + min(at, ends[index]) - begins[index] if index >= 0 else 0.0

    return lambda begin, end: until(end) - until(begin)


def number(values: Mapping[str, Any], name: str) -> float | None:
    """None if the value is not a finite number of at least 0: devices are not trusted."""
    value = values.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _LARGEST_VALUE:
        return float(value)
    return None
