"""Fidelity of an emulation: what was requested of each device against what was measured.

CPU. A device that waits for the network rightly uses less than its share, so the share is measured only
over intervals (from one sample to the next) in which the device demanded more CPU than it had. There are
two signs of that:

- The kernel throttled it in nearly all of the CFS periods in which it ran at all. The measured share is
  CPU seconds ÷ seconds of those periods, so that pauses in between do not count.
- It trained nearly throughout, according to the records of its updates. The measured share is CPU
  seconds ÷ seconds of the interval. Without throttling counters (`process` runtime) this is the only
  sign; with them it shows a host that had less CPU than was requested, where nobody is throttled.

Pauses that these miss make `got` too small: by a few per cent, at the very most by 10 %. Where
neither sign is seen, the device was never busy, and `got` is None.

A device that waits in between is judged by its demand: the kernel counts for how long the client's
thread ran, and for how long it wanted to run and could not (throttled, suspended, or behind others in
the queue of a core). CPU seconds ÷ both is the share that it got while it wanted to run. Under a quota
that is the share requested, or more where short bursts fit into the quota; it is less only where others
took the CPU.

GPU. The most memory that NVML saw a client take must be within the limit, and all of its samples must
show a client under MPS where that is to limit it: one that did not find MPS has the whole GPU. On how
many multiprocessors it ran, NVML does not tell.

Limits. A device's init reads the limits of its container from the kernel, at the start and when they
change. Each must be as requested.

Links. Before the run, probes measure them. In the run, bytes that leave a link's queue while packets
wait in it are held against what its rate allows (`agents.device.backlog`). A whole transfer says less,
as it also waits for the client and the aggregator.

Where the request changed during the run, each phase is measured by itself, and the worst one is the
device's figure.
Times are device time in seconds, shares those of one host core, rates bit/s.
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
    GpuFidelity,
    Interval,
    Requested,
    RequestedCpu,
    RequestedGpu,
    RequestedLink,
)
from testbed.fidelity.limits import differences
from testbed.fidelity.validity import Training

_THROTTLED_SHARE = 0.9
"""Of the periods in which a device ran: the first and the last period of some work are not used up."""
_TRAINED_SHARE = 0.95
"""Of an interval: between two trainings a client waits for a moment."""
_SETTLE_SECONDS = 0.5
"""A limit takes effect a moment after it was set."""

_LIMITS_SETTLE_SECONDS = 3.0
"""Time around a change in which readings are not compared. A device's init reads once a second, and on
a slow host the kernel has new limits a while before the engine confirms them."""
_INSTANT_SECONDS = 1e-6
_SLOW_SHARE, _SLOW_SECONDS = 0.9, 2.0
"""A link is slow that carries less of its rate for so long while packets wait."""
_WAITED_SHARE = 0.9
"""Share of the time between two samples from which on packets count as waiting throughout."""
_LINKS = {"up": "uplink", "down": "downlink"}
"""Fields of a sample that have what a direction of a link carried."""

_LARGEST_VALUE = 1e18
"""Every number of a valid sample is below it."""

_Covered = Callable[[float, float], float]


@dataclass(frozen=True, slots=True)
class Clock:
    """The run clock, and the part of the run that is measured."""

    epoch: float
    """What the monotonic clock of the samples showed at device time 0."""
    begin: float = 0.0
    """Where a resumed run carried on."""
    end: float = math.inf


def measure(
    requested: Iterable[Requested],
    samples: Iterable[Mapping[str, Any]],
    clock: Clock,
    trainings: Mapping[str, Sequence[Training]],
) -> Fidelity:
    """Compare the request with `samples`: telemetry (`agents.device.resource_usage`) and probes, in any
    order.

    A probe is a sample with `probe`, which has any of: `up` and `down`, bit/s on the wire; `rtt` and
    `jitter`, typical and standard deviation of round trips; `loss`, share of round trips. A probe before
    `clock.begin` is of the link as first requested. One with `limits` has those of
    the device's control group from then on. What is no number is ignored.
    """
    usage: dict[str, list[_Usage]] = {}
    on_gpu: dict[str, list[Mapping[str, Any]]] = {}
    probes: dict[str, list[_LinkProbeAt]] = {}
    limits: dict[str, list[_LimitsAt]] = {}
    queues: dict[tuple[str, str], list[_Queue]] = {}
    for sample in samples:
        at, name = _number(sample, "at"), sample.get("device")
        if at is None or not isinstance(name, str) or (when := at - clock.epoch) > clock.end:
            continue
        if isinstance(probe := sample.get("probe"), Mapping):
            before = when < clock.begin  # of the link as first requested, also where a run is resumed
            probes.setdefault(name, []).append(_LinkProbeAt(-math.inf if before else when, probe))
        elif "limits" in sample:
            with suppress(MessageError):
                read = _LimitsAt(when, messages.limits_from_fields(sample["limits"]))
                limits.setdefault(name, []).append(read)
        elif when >= clock.begin and isinstance(gpu := sample.get("gpu"), Mapping):
            on_gpu.setdefault(name, []).append(gpu)
        elif when >= clock.begin and (cpu := _number(sample, "cpu")) is not None:
            counters = (_number(sample, key) or 0.0 for key in ("periods", "throttled_periods"))
            demand = (_number(sample, key) for key in ("ran", "waited"))
            usage.setdefault(name, []).append(_Usage(when, cpu, *counters, *demand))
            for way, key in _LINKS.items():
                if (queue := _queue(when, sample.get(key))) is not None:
                    queues.setdefault((name, way), []).append(queue)
    devices = []
    for one in requested:
        used = sorted(usage.get(one.device, ()), key=lambda sample: sample.at)
        trained = _covered((each.begin, each.end) for each in trainings.get(one.device, ()))
        found = _device(one, used, probes.get(one.device, ()), trained, clock)
        if one.cpu[0].limits is not None:
            known = sorted(limits.get(one.device, ()), key=lambda each: each.at)
            wrong = tuple(dict.fromkeys(_wrong_limits(one, known, clock)))
            found = replace(found, wrong_limits=wrong, unread_limits=_unread_limits(known))
        looked = {way: queues.get((one.device, way)) for way in _LINKS}
        carried = {way: _carried(known) for way, known in looked.items() if known is not None}
        found = replace(found, carried=carried)
        if one.gpu is not None:
            found = replace(found, gpu=_gpu(one.gpu, on_gpu.get(one.device, ())))
        devices.append(found)
    return Fidelity(tuple(devices))


class _Usage(NamedTuple):
    at: float
    cpu: float
    periods: float
    throttled: float
    """Periods in which it was throttled."""
    ran: float | None
    """Seconds in which the client's thread was on a CPU, and in which it wanted to be; None: unknown."""
    waited: float | None


class _Queue(NamedTuple):
    at: float
    busy: float
    """Seconds in which packets waited, in total."""
    left: float
    """Bytes that left then, in total."""
    allowed: float
    """Bytes that the rate allows in that time."""


class _LimitsAt(NamedTuple):
    at: float
    limits: CgroupLimits


class _LinkProbeAt(NamedTuple):
    at: float
    values: Mapping[str, Any]


def _device(
    requested: Requested,
    usage: Sequence[_Usage],
    probes: Sequence[_LinkProbeAt],
    trained: _Covered,
    clock: Clock,
) -> DeviceFidelity:
    away = _covered((begin, end + _SETTLE_SECONDS) for begin, end in requested.away)
    phases = _phases(requested, usage, trained, away)
    end = clock.end if math.isfinite(clock.end) else usage[-1].at if usage else clock.begin
    busy = _worst([phase.busy for phase in phases], ENOUGH_SECONDS, lambda one: one.figure.distance)
    demand = _worst(  # more than requested is no error
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
        used=_used(usage),
        probes=len(probes),
        round_trips=int(sum(_number(probe.values, "round_trips") or 0 for probe in probes)),
        node=requested.node,
    )


def _gpu(requested: RequestedGpu, samples: Iterable[Mapping[str, Any]]) -> GpuFidelity:
    """Of the samples in which a process of the device was on the GPU."""
    seen = [one for one in samples if _number(one, "memory") != 0 or one.get("mps") is True]
    memory = [value for one in seen if (value := _number(one, "memory")) is not None]
    busy = [value for one in seen if (value := _number(one, "sm")) is not None]
    return GpuFidelity(
        requested,
        samples=len(seen),
        memory=int(max(memory)) if memory else None,
        sm=sum(busy) / len(busy) if busy else None,
        outside=sum(one.get("mps") is not True for one in seen) if requested.limited else 0,
    )


def _wrong_limits(requested: Requested, read: Sequence[_LimitsAt], clock: Clock) -> Iterator[str]:
    """Limits that were not as requested when they had settled: whenever they were read, and once after
    each request and each absence, as a request without any effect makes no change to be read."""
    away = _covered((begin, end + _LIMITS_SETTLE_SECONDS) for begin, end in requested.away)
    changes = [max(one.at, clock.begin) for one in requested.cpu] + [end for _, end in requested.away]
    settled = (at + _LIMITS_SETTLE_SECONDS + _INSTANT_SECONDS for at in changes)
    times = [*settled, *(each.at for each in read)]
    for at in sorted(times):
        phase = bisect_right(requested.cpu, at, key=lambda one: one.at) - 1
        index = bisect_right(read, at, key=lambda each: each.at) - 1
        if index < 0 or not clock.begin <= at <= clock.end or away(at - _INSTANT_SECONDS / 2, at):
            continue
        nearest = requested.cpu[max(phase, 1) : phase + 2]  # a change that may be under way
        if not any(abs(at - change.at) < _LIMITS_SETTLE_SECONDS for change in nearest):
            wanted = requested.cpu[phase].limits
            assert wanted is not None  # noqa: S101
            yield from differences(wanted, read[index].limits)


def _unread_limits(read: Sequence[_LimitsAt]) -> str | None:
    if not read:
        return "its limits: never read from the kernel"
    if read[-1].limits.swap is None:
        return "its swap: this host has some, and its kernel cannot limit it"
    return None


def _queue(at: float, fields: object) -> _Queue | None:
    if not isinstance(fields, Mapping):
        return None
    values = [_number(fields, key) for key in ("busy", "left", "allowed")]
    known = [value for value in values if value is not None]
    return _Queue(at, *known) if len(known) == len(values) else None


def _carried(queues: Iterable[_Queue]) -> Carried:
    """Sum up what a direction of a link carried, and find the worst stretch in which it was slow."""
    busy = left = allowed = 0.0
    slow: tuple[float, float, float] | None = None
    stretch: list[tuple[_Queue, _Queue]] = []
    for before, after in pairwise(sorted(queues, key=lambda queue: queue.at)):
        waited = after.busy - before.busy
        if waited < 0:  # its device restarted, with its counters at 0
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
            del stretch[0]  # the rest is long enough
        first = stretch[0][0]
        if after.busy - first.busy >= _SLOW_SECONDS and after.allowed > first.allowed:
            share = (after.left - first.left) / (after.allowed - first.allowed)
            if share < _SLOW_SHARE and (slow is None or share < slow[2]):
                slow = first.at, after.at, share
    return Carried(busy, left / allowed if allowed else None, slow)


def _used(usage: Sequence[_Usage]) -> float | None:
    """Share of one core over all of `usage`; None for less than two samples."""
    if len(usage) < 2 or usage[-1].at <= usage[0].at:
        return None
    cpu = sum(b.cpu if _restarted(a, b) else b.cpu - a.cpu for a, b in pairwise(usage))
    return cpu / (usage[-1].at - usage[0].at)


def _restarted(before: _Usage, after: _Usage) -> bool:
    """Whether the device restarted in between, with its counters at 0."""
    return after.cpu < before.cpu or after.periods < before.periods


@dataclass(slots=True)
class _Cpu:
    """CPU seconds of a device, and the seconds in which it got them."""

    requested: float
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
    """A time in which the same share was requested."""

    busy: _Cpu
    """While the device demanded more than it had."""
    demand: _Cpu
    """While its client ran or waited for a CPU."""
    observed: float = 0.0


def _phases(
    requested: Requested, usage: Sequence[_Usage], trained: _Covered, away: _Covered
) -> list[_Phase]:
    phases = [_Phase(_Cpu(one.share), _Cpu(one.share)) for one in requested.cpu]
    for before, after in pairwise(usage):
        index = _phase(requested.cpu, before.at, after.at)
        if index is None or _restarted(before, after) or away(before.at, after.at):
            continue
        phase, cpu = phases[index], after.cpu - before.cpu
        phase.observed += after.at - before.at
        period = requested.cpu[index].period
        phase.busy.add(cpu, _busy_seconds(before, after, period, trained(before.at, after.at)))
        if (wanted := _wanted_seconds(before, after)) is not None:
            phase.demand.add(cpu, wanted)
    return phases


def _worst(phases: Sequence[_Cpu], enough: float, error: Callable[[_Cpu], float]) -> _Cpu:
    """Of the phases based on enough seconds the one with the largest `error`, or else the longest."""
    sufficient = [one for one in phases if one.seconds >= enough]
    return max(sufficient, key=error) if sufficient else max(phases, key=lambda one: one.seconds)


def _wanted_seconds(before: _Usage, after: _Usage) -> float | None:
    """Seconds of an interval in which the client ran or waited for a CPU; None where that is unknown."""
    if before.ran is None or before.waited is None or after.ran is None or after.waited is None:
        return None
    if after.ran < before.ran:  # another client
        return None
    wanted = after.ran - before.ran + after.waited - before.waited
    return min(wanted, after.at - before.at)  # a process may be suspended while it waits for a core


def _busy_seconds(before: _Usage, after: _Usage, period: float | None, trained: float) -> float:
    """Seconds of an interval in which the device demanded more CPU than it had; 0 without a sign."""
    periods = after.periods - before.periods
    # With no period before it, the limit may have been set in mid-interval, after a restart.
    throttled = before.periods and after.throttled - before.throttled >= _THROTTLED_SHARE * periods
    if period is not None and periods and throttled:
        # Not by the clock: a throttled device may read it a period before it reads its counters.
        return periods * period
    seconds = after.at - before.at
    return seconds if trained >= _TRAINED_SHARE * seconds else 0.0


def _phase(
    requested: Sequence[RequestedCpu] | Sequence[RequestedLink], begin: float, end: float
) -> int | None:
    """Index of what was in force, and settled, from `begin` to `end`; None if nothing was throughout."""
    index = bisect_right(requested, begin, key=lambda one: one.at) - 1
    if index < 0 or (index > 0 and begin < requested[index].at + _SETTLE_SECONDS):
        return None
    changed = index + 1 < len(requested) and requested[index + 1].at < end
    return None if changed else index


def _link_figure(
    name: str, requested: Sequence[RequestedLink], probes: Sequence[_LinkProbeAt]
) -> Figure:
    """The worst phase's figure; within a phase the median, as the run's traffic may disturb a probe."""
    phases = requested or (RequestedLink(),)
    values: dict[int, list[float]] = {}
    for probe in probes:
        at = max(probe.at, phases[0].at)
        value, phase = _number(probe.values, name), _phase(phases, at, at)
        if value is not None and phase is not None:
            values.setdefault(phase, []).append(value)
    if not values:
        return Figure(phases[0].figures()[name])
    figures = [Figure(phases[phase].figures()[name], median(got)) for phase, got in values.items()]
    return max(figures, key=lambda figure: figure.distance)


def _covered(intervals: Iterable[Interval]) -> _Covered:
    """A function of begin and end: how many seconds between them `intervals` cover, overlaps once."""
    begins: list[float] = []
    ends: list[float] = []
    total: list[float] = []  # covered before each begin
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


def _number(values: Mapping[str, Any], name: str) -> float | None:
    """A value that a device sent, if it is a finite number, zero or more: devices are not trusted."""
    value = values.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _LARGEST_VALUE:
        return float(value)
    return None
