"""Validity of a run: whether its results can be believed.

A host can fail to keep up with the emulation. Its load, late timers and the devices' measured figures
are compared with thresholds; a run that exceeds one is not valid, and the reason is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

from agents.events import Disrupted, WrongSum
from agents.texts import quantity
from testbed.fidelity.figures import CPU, RATES, Fidelity, Worst
from testbed.fidelity.host_load import HostSample, mean

_FULL_LOAD = 0.95
"""Load from which a core or a server counts as full: kernel and sampling itself take the rest."""
_FULL_SHARE_OF_RUN = 0.2
"""Short full phases of the server's core are normal, and only some updates fall into them."""
_FULL_SECONDS = 3.0
"""In a short run some seconds of start and end are many per cent."""
_FOREIGN_SHARE = 0.12
"""Of the CPU time of the devices' cores. Where shares are kept all the same, other work between two of a
device's slices may leave it cold caches. Engine and controller themselves took up to 8 % in runs of 8 s,
two busy loops 16 %."""
_ELSEWHERE_SHARE = 0.18
"""Of the CPU time of the whole host; engine and kernel took up to 12 % of two cores. Work on other cores
leaves the shares alone, but shares caches and memory with the devices: copies of 64 MB and a busy disk
made steps longer, busy loops did not, and CPU times do not tell one from the other
(docs/guide/verdict.md)."""
_STEAL_SHARE = 0.05
"""Of the CPU time: many kernels charge it to the device that was running, so that no figure of a device
shows it."""
_LATE_SECONDS = 0.25
"""As late as this, the process runtime has left devices suspended or running for several of its
periods, and stamps of time are off by as much as a training may take."""
_LATE_SHARE_OF_RUN = 0.05
"""Single late timers are normal: a cron job causes them."""
_STALL_SECONDS = 2.0
"""As late as this, the machine was paused or asleep, while the experiment's clock went on."""
_CPU_ERROR_PERCENT = 10.0
"""The emulation holds shares to 1 %, and pauses may take up to 10 off a figure (`measuring`)."""
_LINK_ERROR_PERCENT = 10.0
"""Queues and TCP's start cost a probe some per cent of the rate."""
FAILED_LINK_PERCENT = 25.0
"""No run starts on a link whose rate is as far off as that. A busy host does less to it: beside
twice as many busy processes as there are cores, rates were within 1 %. Round trips it may delay:
once, one of 80 ms took 44 % more."""
_DRIFT = 1.25
"""Ratio of training times from which a run counts as disturbed: other guests of a hypervisor change
them by some per cent from one second to the next."""
_DRIFT_WINDOWS, _WINDOW_TRAININGS = 4, 8
"""Windows of a run that are compared, and how many trainings each must have."""
_MIN_SECONDS = 3.0
"""A run that is shorter than this says too little of its host."""
_CLOCK_SECONDS, _OF_A_DELAY = 1e-3, 0.1
"""By how much the times of another host may be off, and how much of the shortest delay of a link that
may be."""
_TITLES = {"up": "uplink", "down": "downlink", "rtt": "round trip"}
"""Names of a link's figures in a sentence."""
_STEP_LATE_SECONDS = 0.5
"""A change of many devices takes some tenths, and samples of what it did are a second apart."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step of the scenario, once it has been done."""

    what: str
    """As in `set of pi-1`."""
    due: float
    """Device time in seconds."""
    done: float


@dataclass(frozen=True, slots=True)
class Training:
    """A device's training for an update that was applied."""

    begin: float
    end: float
    pace: float | None = None
    """Seconds per step at one core: what it took × the share requested ÷ steps; None where something
    was done to the device's CPU meanwhile."""


@dataclass(frozen=True, slots=True)
class Validity:
    reasons: tuple[str, ...] = ()
    """Why the run is not valid."""
    unjudged: tuple[str, ...] = ()
    """What could not be checked, and why."""

    @property
    def valid(self) -> bool | None:
        """Whether all that was requested was checked and met; None where something could not be checked,
        and nothing else speaks against the run."""
        return False if self.reasons else None if self.unjudged else True

    @property
    def verdict(self) -> Literal["valid", "not valid", "not judged"]:
        return _VERDICTS[self.valid]

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "valid": self.valid,
            "reasons": list(self.reasons),
            "unjudged": list(self.unjudged),
        }

    def after(self, earlier: Validity, without: int = 0) -> Validity:
        """Of a run that was resumed, as a whole: this is of its last segment, `earlier` of those before,
        and so many of them ended `without` a verdict."""
        lost = (f"{quantity(without, 'earlier segment')} of the run: ended without a verdict",)
        return Validity(
            tuple(dict.fromkeys(earlier.reasons + self.reasons)),
            tuple(dict.fromkeys(earlier.unjudged + lost * (without > 0) + self.unjudged)),
        )

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Validity:
        """Of a manifest's entry."""
        reasons, unjudged = (tuple(map(str, entry.get(key, ()))) for key in ("reasons", "unjudged"))
        return cls(reasons, unjudged)


_VERDICTS: dict[bool | None, Literal["valid", "not valid", "not judged"]] = {
    True: "valid",
    False: "not valid",
    None: "not judged",
}


@dataclass(frozen=True, slots=True)
class Judgement:
    """How well a run was emulated, up to where it ended."""

    fidelity: Fidelity
    validity: Validity
    steps: tuple[StepDone, ...]
    """Of the scenario."""


def verdict(
    host: Sequence[HostSample],
    fidelity: Fidelity,
    *,
    steps: Iterable[StepDone] = (),
    trainings: Iterable[Sequence[Training]] = (),
    failures: Sequence[str] = (),
    disruptions: Iterable[Disrupted] = (),
    wrong_sums: Sequence[WrongSum] = (),
    others: Mapping[str, Sequence[HostSample]] = MappingProxyType({}),
) -> Validity:
    """Whether the run can be believed, from samples of the host taken while its clock went, what devices
    got, the actions on devices and the processes that failed, when the run did not go on, and the sums
    of masked updates that were wrong. Lack of evidence is never `valid`. `others` has samples of other
    hosts with devices, by name."""
    reasons = [*load(host), *_shares(fidelity, host)]
    for name, samples in others.items():
        reasons += [f"{name}: {reason}" for reason in load(samples)]
    if (doubt := link_doubt(fidelity)) is not None:
        reasons.append(doubt)
    reasons += [
        *_slow_links(fidelity),
        *_wrong_limits(fidelity),
        *_unrequested(fidelity),
        *_gpus(fidelity),
        *_drift(trainings),
        *_late_steps(steps),
    ]
    reasons += _clocks(fidelity)
    reasons += _disrupted(disruptions)
    if wrong_sums:
        first = wrong_sums[0]
        reasons.append(
            f"a sum of masked updates was wrong at {first.at:.1f} s "
            f"({first.senders}){_others(len(wrong_sums))}"
        )
    if failures:
        reasons.append(f"{failures[0]}{_others(len(failures))}")
    unjudged = [*_unjudged(host, fidelity)]
    for name, samples in others.items():
        known = [sample for sample in samples if sample.foreign is not None]
        if _seconds(known) < _MIN_SECONDS:
            unjudged.append(f"{name}: its load was seen for {_seconds(known):.1f} s, which is too short")
    return Validity(tuple(reasons), tuple(unjudged))


def load(host: Sequence[HostSample]) -> Iterator[str]:
    """What of the host's load speaks against a run."""
    yield from _server(host)
    yield from _foreign(host)
    yield from _stolen(host)
    yield from _late(host)


def _unjudged(host: Sequence[HostSample], fidelity: Fidelity) -> Iterator[str]:
    if _seconds(host) < _MIN_SECONDS:
        yield f"the load of this host: sampled for {_seconds(host):.1f} s, which is too short"
    elif all(sample.server_load is None for sample in host):
        yield "other work, and waiting servers: the run's processes cannot be seen from this host"
    elif all(sample.foreign is None for sample in host):
        yield "other work: the kernel's counters do not tell what the devices' cores did, and for whom"
    if (share := (mean(host, "elsewhere") or 0.0)) > _ELSEWHERE_SHARE:
        yield (
            f"what steps cost: other work took {share:.0%} of this host's CPU time, and may have slowed "
            "down caches and memory"
        )
    reasons: dict[str, list[str]] = {}
    for one in fidelity.devices:
        for what in one.unjudged():
            reasons.setdefault(what.partition(":")[0], []).append(f"{one.device}, {what}")
    for found in reasons.values():
        yield f"{found[0]}{_others(len(found))}"


def _wrong_limits(fidelity: Fidelity) -> Iterator[str]:
    """Limits that the kernel had otherwise than requested."""
    if wrong := [one for one in fidelity.devices if one.wrong_limits]:
        what = "; ".join(wrong[0].wrong_limits)
        yield f"the kernel has other limits for {wrong[0].device}: {what}{_others(len(wrong))}"


def _slow_links(fidelity: Fidelity) -> Iterator[str]:
    """Links that carried less than their rate in the run, while packets waited."""
    slow = [
        (one.slow, _TITLES[way], device.device)
        for device in fidelity.devices
        for way, one in device.carried.items()
        if one.slow is not None
    ]
    if slow:
        (begin, end, share), title, device = min(slow, key=lambda entry: entry[0][2])
        yield (
            f"the {title} of {device} carried {share:.0%} of its rate from {begin:.0f} to {end:.0f} s, "
            f"while packets waited{_others(len(slow))}"
        )


def _unrequested(fidelity: Fidelity) -> Iterator[str]:
    """Loss beyond chance, and delay where none was requested."""
    lossy = [one for one in fidelity.devices if one.loss_is_off]
    if lossy:
        worst = max(lossy, key=lambda one: one.figures["loss"].got or 0.0)
        loss = worst.figures["loss"]
        requested = "no loss" if not loss.requested else f"{loss.requested:.1%}"
        yield (
            f"{worst.device} lost {loss.got:.1%} of its round trips where {requested} was "
            f"asked{_others(len(lossy))}"
        )
    slow = [(delay, one) for one in fidelity.devices if (delay := one.unrequested_delay) is not None]
    if slow:
        delay, device = max(slow, key=lambda entry: entry[0])
        yield (
            f"round trips of {device.device} took {1e3 * delay:.0f} ms where no delay was "
            f"asked{_others(len(slow))}"
        )


def _gpus(fidelity: Fidelity) -> Iterator[str]:
    """GPUs of which a device had more than it was to have."""
    having = [(one.device, one.gpu) for one in fidelity.devices if one.gpu is not None]
    if free := [device for device, gpu in having if gpu.outside]:
        yield f"{free[0]} had its whole GPU: its client ran without MPS's limits{_others(len(free))}"
    if over := [(device, gpu) for device, gpu in having if gpu.over_memory]:
        device, gpu = max(over, key=lambda each: each[1].memory or 0)
        yield (
            f"{device} took {(gpu.memory or 0) / 2**20:.0f} MiB of its GPU where "
            f"{(gpu.requested.memory or 0) / 2**20:.0f} were the limit{_others(len(over))}"
        )


def _drift(trainings: Iterable[Sequence[Training]]) -> Iterator[str]:
    """Whether trainings took longer in some window of the run than in the rest of it."""
    paces: list[tuple[float, float]] = []
    for device in trainings:
        known = [((one.begin + one.end) / 2, one.pace) for one in device if one.pace is not None]
        if len(known) > 1 and (typical := median(pace for _, pace in known)) > 0:
            paces += [(at, pace / typical) for at, pace in known]
    if len(paces) < 2 * _WINDOW_TRAININGS:
        return
    begin, end = min(paces)[0], max(paces)[0]
    width = (end - begin) / _DRIFT_WINDOWS
    worst = 1.0, 0.0
    for index in range(_DRIFT_WINDOWS if width > 0 else 0):
        low, high = begin + index * width, begin + (index + 1) * width
        inside = [pace for at, pace in paces if low <= at <= high]
        outside = [pace for at, pace in paces if not low <= at <= high]
        if min(len(inside), len(outside)) >= _WINDOW_TRAININGS:
            ratio = median(inside) / median(outside)
            worst = max(worst, (ratio, low), key=lambda entry: abs(math.log(entry[0])))
    ratio, low = worst
    if abs(math.log(ratio)) > math.log(_DRIFT):
        digits = 0 if width >= 2 else 2  # no "from 1 to 1 s"
        yield (
            f"trainings took {ratio:.2g} times as long from {low:.{digits}f} to "
            f"{low + width:.{digits}f} s as in the rest of the run: something disturbed the devices"
        )


def _server(host: Sequence[HostSample]) -> Iterator[str]:
    full = [sample for sample in host if (sample.server_load or 0.0) >= _FULL_LOAD]
    if full and _seconds(full) >= max(_FULL_SECONDS, _FULL_SHARE_OF_RUN * _seconds(host)):
        yield (
            f"aggregator, broker or router ran or waited for a CPU without a pause in {_of(full, host)}:"
            " updates waited for the server"
        )


def _foreign(host: Sequence[HostSample]) -> Iterator[str]:
    if (share := (mean(host, "foreign") or 0.0)) > _FOREIGN_SHARE:
        yield (
            f"other work on this host took {share:.0%} of the devices' cores: a training step may have "
            "cost more than on a quiet host"
        )


def _stolen(host: Sequence[HostSample]) -> Iterator[str]:
    if (steal := (mean(host, "steal") or 0.0)) > _STEAL_SHARE:
        yield (
            f"the hypervisor took {steal:.0%} of this machine's CPU time: devices were slower than "
            "their shares say"
        )


def _late(host: Sequence[HostSample]) -> Iterator[str]:
    worst = max(host, key=lambda sample: sample.tick_lateness, default=None)
    late = [sample for sample in host if sample.tick_lateness > _LATE_SECONDS]
    if worst is not None and worst.tick_lateness > _STALL_SECONDS:
        yield (
            f"this host stood still for {worst.tick_lateness:.1f} s at {worst.at:.0f} s, while the "
            "run's clock went on"
        )
    elif worst is not None and _seconds(late) > _LATE_SHARE_OF_RUN * _seconds(host):
        yield (
            f"timers came up to {worst.tick_lateness:.2g} s late, in {_of(late, host)}: the host could "
            "not keep up"
        )


def _shares(fidelity: Fidelity, host: Sequence[HostSample]) -> Iterator[str]:
    off, worst = _beyond(fidelity, (CPU,), _CPU_ERROR_PERCENT)
    if worst is None:
        return
    reason = (
        f"{worst.device.device} got {worst.figure.got:.3g} of a core where "
        f"{worst.figure.requested:.3g} was asked, {worst.off}{_others(off)}"
    )
    full = [sample for sample in host if sample.device_busy >= _FULL_LOAD]
    if full and worst.error < 0:
        reason += f"; the devices' cores were full for {_of(full, host)}"
    yield reason


def link_doubt(
    fidelity: Fidelity, limit: float = _LINK_ERROR_PERCENT, names: tuple[str, ...] = (*RATES, "rtt")
) -> str | None:
    """A sentence on the links that are farther off than `limit` (%) in the figures `names`, if any."""
    off, worst = _beyond(fidelity, names, limit)
    if worst is None:
        return None
    return f"the {_TITLES[worst.name]} of {worst.device.device} was {worst.off} than asked{_others(off)}"


def _beyond(fidelity: Fidelity, names: tuple[str, ...], limit: float) -> tuple[int, Worst | None]:
    """How many devices are farther off than `limit` (%), and the worst of them."""
    off = sum(
        any(name in names and figure.distance > limit for name, figure in one.judged())
        for one in fidelity.devices
    )
    return off, fidelity.worst(*names) if off else None


def _late_steps(steps: Iterable[StepDone]) -> Iterator[str]:
    late = [step for step in steps if step.done - step.due > _STEP_LATE_SECONDS]
    if late:
        worst = max(late, key=lambda step: step.done - step.due)
        yield (
            f"the scenario's step at {worst.due:g} s ({worst.what}) came {worst.done - worst.due:.1f} s "
            f"late{_others(len(late))}"
        )


def _clocks(fidelity: Fidelity) -> Iterator[str]:
    """Whether the times of devices on other hosts are known well enough."""
    delays = [rtt / 2 for one in fidelity.devices if (rtt := one.figures["rtt"].requested)]
    limit = min([_CLOCK_SECONDS, *(_OF_A_DELAY * delay for delay in delays)])
    off = {host: one for host, one in fidelity.clocks.items() if one > limit}
    if off:
        host = max(off, key=lambda name: off[name])
        yield (
            f"times of {host} may be off by {1e3 * off[host]:.2g} ms, where {1e3 * limit:.2g} ms is the "
            f"most{_others(len(off))}: the network between the hosts is too slow, or they are too busy"
        )


def _disrupted(disruptions: Iterable[Disrupted]) -> Iterator[str]:
    """A sentence per reason, about the longest time. Several may have noticed the same one."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for one in sorted(disruptions, key=lambda one: one.since):
        known = spans.setdefault(one.reason, [])
        if known and one.since <= known[-1][1]:  # the last says when it was over
            known[-1] = known[-1][0], max(known[-1][1], one.at)
        else:
            known.append((one.since, one.at))
    for reason, found in spans.items():
        since, at = max(found, key=lambda span: span[1] - span[0])
        yield f"{reason} from {since:.1f} to {at:.1f} s{_others(len(found))}"


def _others(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""


def _of(part: Sequence[HostSample], whole: Sequence[HostSample]) -> str:
    return f"{_seconds(part):.0f} of {_seconds(whole):.0f} s"


def _seconds(samples: Iterable[HostSample]) -> float:
    return sum(sample.seconds for sample in samples)
