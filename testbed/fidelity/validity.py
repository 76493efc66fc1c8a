"""Validity of a run: whether its results can be trusted.

A host can be too slow for the emulation. So its load, the lateness of timers, and the devices' figures
are compared with thresholds. The verdict names each one that is exceeded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

from agents.events import Disrupted, Note, WrongSum
from agents.texts import quantity
from testbed.fidelity.figures import CPU, RATES, Fidelity
from testbed.fidelity.host_load import HostSample, mean

_FULL_LOAD = 0.95
"""Minimum load of a full core or server. The kernel and the sampling need the rest of the time."""
_FULL_SHARE_OF_RUN = 0.2
"""Maximum share of the run in which a server may be full. Short phases affect only some updates."""
_FULL_SECONDS = 3.0
"""A server may always be full for less than this: start and end take a large share of a short run."""
_FOREIGN_SHARE = 0.12
"""Maximum share of the devices' CPU time that other work may take. Even if a device gets its share,
other work that runs between two time slices of the device may evict the device's data from the caches.
Engine and controller took up to 8 % in runs of 8 s, two busy loops took 16 %."""
_ELSEWHERE_SHARE = 0.18
"""Maximum share of the host's CPU time that other work may take. Engine and kernel took up to 12 % of
two cores. Work on other cores does not change the shares of devices, but such work competes for caches
and memory. Copies of 64 MB and a busy disk made steps longer; busy loops did not. CPU times do not show
the kind of work (docs/guide/verdict.md)."""
_STEAL_SHARE = 0.05
"""Maximum share of CPU time that the hypervisor may take. Many kernels charge the stolen time to the
device that was running, so no figure of a device shows the loss."""
_LATE_SECONDS = 0.25
"""Lateness from which a timer counts as late. The process runtime then leaves devices suspended or
running for several of its periods, and time stamps are off by as much as a training may take."""
_LATE_SHARE_OF_RUN = 0.05
"""Maximum share of the run with late timers. Single ones are normal, for example when a cron job
runs."""
_STALL_SECONDS = 2.0
"""Lateness above which the machine was paused or asleep while the run clock continued."""
_CPU_ERROR_PERCENT = 10.0
"""Emulation keeps shares to 1 %, but unnoticed pauses may lower a measured share by up to 10 %
(`measuring`)."""
_LINK_ERROR_PERCENT = 10.0
"""Maximum error of a link's figure. Queues and TCP's slow start cost a probe some per cent of the
rate."""
FAILED_LINK_PERCENT = 25.0
"""Error of a link's rate above which a run does not start. A busy host causes smaller ones: with twice
as many busy processes as cores, rates were within 1 %. Round trips are not checked, because a busy host
may delay them: a round trip of 80 ms once took 44 % longer."""
_DRIFT = 1.25
"""Maximum ratio between the training times in one window of a run and in the rest, in either direction.
Other guests of a hypervisor change training times by some per cent from second to second."""
_DRIFT_WINDOWS, _WINDOW_TRAININGS = 4, 8
"""Windows of a run, and minimum number of trainings in each."""
_MOMENT_SECONDS = 0.05
"""A shorter disruption is named by its begin alone: its end was not seen."""
_MIN_SECONDS = 3.0
"""Minimum time with samples to judge the host."""
_CLOCK_SECONDS, _OF_A_DELAY = 1e-3, 0.1
"""Maximum error of another host's times: in seconds, and as a share of a link's shortest delay."""
_TITLES = {"up": "uplink", "down": "downlink", "rtt": "round trip"}
_DOUBT = ": this run will not be valid"
"""End of a note, during a run."""
_STEP_LATE_SECONDS = 0.5
"""Maximum lateness of a step of the scenario. A change of many devices takes some tenths of a second,
and samples of its effect are a second apart."""


@dataclass(frozen=True, slots=True)
class StepDone:
    what: str
    """Action and device, as in `set of pi-1`."""
    due: float
    """Device time in seconds."""
    done: float
    """Device time in seconds."""


@dataclass(frozen=True, slots=True)
class TrainingSpan:
    """A device's training for an update that was applied. Begin and end are device times in seconds."""

    begin: float
    end: float
    pace: float | None = None
    """Seconds per step on a whole core: duration × requested share ÷ steps. None if unknown, for example
    because the CPU share changed during the training, or the device was absent."""


@dataclass(frozen=True, slots=True)
class Validity:
    reasons: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    """Checks that were not possible, with the reason."""

    @property
    def valid(self) -> bool | None:
        """None if nothing speaks against the run, but something could not be checked."""
        return False if self.reasons else None if self.unjudged else True

    @property
    def verdict(self) -> Literal["valid", "not valid", "not judged"]:
        return _VERDICTS[self.valid]

    def as_dict(self) -> dict[str, Any]:
        return {
            "valid": self.valid,
            "reasons": list(self.reasons),
            "unjudged": list(self.unjudged),
        }

    def after(self, earlier: Validity, without: int = 0) -> Validity:
        """Validity of a whole resumed run, whose last leg this is. `without`: number of earlier
        legs that ended without a verdict."""
        lost = (f"{quantity(without, 'earlier leg')} of the run: ended without a verdict",)
        return Validity(
            tuple(dict.fromkeys(earlier.reasons + self.reasons)),
            tuple(dict.fromkeys(earlier.unjudged + lost * (without > 0) + self.unjudged)),
        )

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Validity:
        reasons, unjudged = (tuple(map(str, entry.get(key, ()))) for key in ("reasons", "unjudged"))
        return cls(reasons, unjudged)


_VERDICTS: dict[bool | None, Literal["valid", "not valid", "not judged"]] = {
    True: "valid",
    False: "not valid",
    None: "not judged",
}


@dataclass(frozen=True, slots=True)
class Judgement:
    fidelity: Fidelity
    validity: Validity
    steps: tuple[StepDone, ...]


def verdict(
    host: Sequence[HostSample],
    fidelity: Fidelity,
    *,
    steps: Iterable[StepDone] = (),
    trainings: Iterable[Sequence[TrainingSpan]] = (),
    failures: Sequence[str] = (),
    disruptions: Iterable[Disrupted] = (),
    wrong_sums: Sequence[WrongSum] = (),
    others: Mapping[str, Sequence[HostSample]] = MappingProxyType({}),
) -> Validity:
    """Judge a run. Missing evidence never makes a run valid.

    `host`: samples while the run clock was running. `trainings`: those of each device. `failures`:
    actions and processes that failed. `disruptions`: by the testbed itself. `others`: samples of other
    hosts with devices, by name.
    """
    reasons = [*load(host), *_wrong_shares(fidelity, host)]
    for name, samples in others.items():
        reasons += [f"{name}: {reason}" for reason in load(samples)]
    if (doubt := link_doubt(fidelity)) is not None:
        reasons.append(doubt)
    reasons += [
        *(reason for feature in fidelity.features for reason in feature.reasons),
        *_slow_links(fidelity),
        *_wrong_limits(fidelity),
        *_unrequested_effects(fidelity),
        *_drift(trainings),
        *_late_steps(steps),
    ]
    reasons += _clock_errors(fidelity)
    reasons += _disruption_reasons(disruptions)
    reasons += _wrong_sum_reasons(wrong_sums)
    if failures:
        reasons.append(f"{failures[0]}{more_text(len(failures))}")
    unjudged = [*_unjudged(host, fidelity)]
    for name, samples in others.items():
        known = [sample for sample in samples if sample.foreign is not None]
        if _seconds(known) < _MIN_SECONDS:
            unjudged.append(f"{name}: its load was sampled for {_seconds(known):.1f} s: too short")
    return Validity(tuple(reasons), tuple(unjudged))


def doubt_note(doubt: str) -> str:
    return f"{doubt}{_DOUBT}"


def recorded_reasons(records: Sequence[Note | Disrupted | WrongSum]) -> tuple[str, ...]:
    """Reasons against a run that are in its records while it continues."""
    notes = [record.message for record in records if isinstance(record, Note)]
    doubts = [note.removesuffix(_DOUBT) for note in notes if note.endswith(_DOUBT)]
    disruptions = [record for record in records if isinstance(record, Disrupted)]
    wrong = [record for record in records if isinstance(record, WrongSum)]
    return (*dict.fromkeys(doubts), *_disruption_reasons(disruptions), *_wrong_sum_reasons(wrong))


def load(host: Sequence[HostSample]) -> Iterator[str]:
    yield from _busy_server(host)
    yield from _foreign_load(host)
    yield from _stolen_time(host)
    yield from _late_timers(host)


def _unjudged(host: Sequence[HostSample], fidelity: Fidelity) -> Iterator[str]:
    if _seconds(host) < _MIN_SECONDS:
        yield f"the load of this host: it was sampled for {_seconds(host):.1f} s, which is too short"
    elif all(sample.server_load is None for sample in host):
        yield "other work, and waiting servers: the run's processes cannot be seen from this host"
    elif all(sample.foreign is None for sample in host):
        yield "other work: the kernel's counters do not show which processes used the devices' cores"
    if (share := (mean(host, "elsewhere") or 0.0)) > _ELSEWHERE_SHARE:
        yield (
            f"the cost of steps: other work took {share:.0%} of this host's CPU time, and may have "
            "slowed down caches and memory"
        )
    lacking = [(one.device, what) for one in fidelity.devices for what in one.unjudged()]
    lacking += [one for feature in fidelity.features for one in feature.unjudged]
    reasons: dict[str, list[str]] = {}
    for device, what in lacking:
        reasons.setdefault(what.partition(":")[0], []).append(f"{device}, {what}")
    for found in reasons.values():
        yield f"{found[0]}{more_text(len(found))}"


def _wrong_limits(fidelity: Fidelity) -> Iterator[str]:
    if wrong := [one for one in fidelity.devices if one.wrong_limits]:
        what = "; ".join(wrong[0].wrong_limits)
        yield f"the kernel has other limits for {wrong[0].device}: {what}{more_text(len(wrong))}"


def _slow_links(fidelity: Fidelity) -> Iterator[str]:
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
            f"while packets waited{more_text(len(slow))}"
        )


def _unrequested_effects(fidelity: Fidelity) -> Iterator[str]:
    """Yield reasons for a share of lost round trips other than requested, and for a delay that was not
    requested."""
    lossy = [one for one in fidelity.devices if one.loss_is_off]
    if lossy:
        worst = max(lossy, key=lambda one: one.figures["loss"].got or 0.0)
        loss = worst.figures["loss"]
        requested = "no loss" if not loss.requested else f"{loss.requested:.1%}"
        yield (
            f"{worst.device} lost {loss.got:.1%} of its round trips, but {requested} was "
            f"requested{more_text(len(lossy))}"
        )
    slow = [(delay, one) for one in fidelity.devices if (delay := one.unrequested_delay) is not None]
    if slow:
        delay, device = max(slow, key=lambda entry: entry[0])
        yield (
            f"round trips of {device.device} took {1e3 * delay:.0f} ms, but no delay was "
            f"requested{more_text(len(slow))}"
        )


def _drift(trainings: Iterable[Sequence[TrainingSpan]]) -> Iterator[str]:
    """Yield a reason if trainings took much longer, or much less, in one window than in the rest of the
    run."""
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
        digits = 0 if width >= 2 else 2  # otherwise a text such as "from 1 to 1 s"
        yield (
            f"trainings took {ratio:.2g} times as long from {low:.{digits}f} to "
            f"{low + width:.{digits}f} s as in the rest of the run: something disturbed the devices"
        )


def _busy_server(host: Sequence[HostSample]) -> Iterator[str]:
    full = [sample for sample in host if (sample.server_load or 0.0) >= _FULL_LOAD]
    if full and _seconds(full) >= max(_FULL_SECONDS, _FULL_SHARE_OF_RUN * _seconds(host)):
        yield (
            "aggregator, broker or router ran or waited for a CPU without a pause for "
            f"{_time_text(full, host)}: updates waited for the server"
        )


def _foreign_load(host: Sequence[HostSample]) -> Iterator[str]:
    if (share := (mean(host, "foreign") or 0.0)) > _FOREIGN_SHARE:
        yield (
            f"other work on this host took {share:.0%} of the devices' cores: a training step may have "
            "cost more than on a quiet host"
        )


def _stolen_time(host: Sequence[HostSample]) -> Iterator[str]:
    if (steal := (mean(host, "steal") or 0.0)) > _STEAL_SHARE:
        yield (
            f"the hypervisor took {steal:.0%} of this machine's CPU time: devices were slower than "
            "their shares say"
        )


def _late_timers(host: Sequence[HostSample]) -> Iterator[str]:
    worst = max(host, key=lambda sample: sample.tick_lateness, default=None)
    late = [sample for sample in host if sample.tick_lateness > _LATE_SECONDS]
    if worst is not None and worst.tick_lateness > _STALL_SECONDS:
        yield (
            f"this host stood still for {worst.tick_lateness:.1f} s at {worst.at:.0f} s, while the "
            "run clock continued"
        )
    elif worst is not None and _seconds(late) > _LATE_SHARE_OF_RUN * _seconds(host):
        yield (
            f"timers were up to {worst.tick_lateness:.2g} s late, in {_time_text(late, host)}: "
            "the host was too slow"
        )


def _wrong_shares(fidelity: Fidelity, host: Sequence[HostSample]) -> Iterator[str]:
    off = len(_beyond(fidelity, (CPU,), _CPU_ERROR_PERCENT))
    worst = fidelity.worst(CPU)
    if not off or worst is None:
        return
    reason = (
        f"{worst.device.device} got {worst.figure.got:.3g} of a core, {worst.deviation} than the "
        f"requested {worst.figure.requested:.3g}{more_text(off)}"
    )
    full = [sample for sample in host if sample.device_busy >= _FULL_LOAD]
    if full and worst.error < 0:
        reason += f"; the devices' cores were full for {_time_text(full, host)}"
    yield reason


def link_doubt(
    fidelity: Fidelity, limit: float = _LINK_ERROR_PERCENT, names: tuple[str, ...] = (*RATES, "rtt")
) -> str | None:
    """Sentence on links with an error above `limit` (%) in one of `names`; None if there is none."""
    off, worst = len(_beyond(fidelity, names, limit)), fidelity.worst(*names)
    if not off or worst is None:
        return None
    title, device = _TITLES[worst.name], worst.device.device
    return f"the {title} of {device} was {worst.deviation} than requested{more_text(off)}"


def wrong_links(fidelity: Fidelity) -> list[str]:
    """Return the devices whose link, as measured before the run, counts against it."""
    rates = _beyond(fidelity, (*RATES, "rtt"), _LINK_ERROR_PERCENT)
    return [
        one.device
        for one in fidelity.devices
        if one.device in rates or one.loss_is_off or one.unrequested_delay is not None
    ]


def _beyond(fidelity: Fidelity, names: tuple[str, ...], limit: float) -> list[str]:
    """Devices with an error above `limit` (%) in one of `names`."""
    return [
        one.device
        for one in fidelity.devices
        if any(name in names and figure.distance > limit for name, figure in one.judged_figures())
    ]


def _late_steps(steps: Iterable[StepDone]) -> Iterator[str]:
    late = [step for step in steps if step.done - step.due > _STEP_LATE_SECONDS]
    if late:
        worst = max(late, key=lambda step: step.done - step.due)
        yield (
            f"the scenario's step at {worst.due:g} s ({worst.what}) was {worst.done - worst.due:.1f} s "
            f"late{more_text(len(late))}"
        )


def _clock_errors(fidelity: Fidelity) -> Iterator[str]:
    """Yield a reason if times of another host's devices may have too large an error."""
    delays = [rtt / 2 for one in fidelity.devices if (rtt := one.figures["rtt"].requested)]
    limit = min([_CLOCK_SECONDS, *(_OF_A_DELAY * delay for delay in delays)])
    off = {host: one for host, one in fidelity.clocks.items() if one > limit}
    if off:
        host = max(off, key=lambda name: off[name])
        yield (
            f"times of {host} may be off by {1e3 * off[host]:.2g} ms, at most {1e3 * limit:.2g} ms is "
            f"allowed{more_text(len(off))}: the network between the hosts is too slow, or they are too "
            "busy"
        )


def _disruption_reasons(disruptions: Iterable[Disrupted]) -> Iterator[str]:
    """One sentence per reason, on the longest disruption. Overlapping ones count once, because several
    processes may have reported the same."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for one in sorted(disruptions, key=lambda one: one.since):
        known = spans.setdefault(one.reason, [])
        if known and one.since <= known[-1][1]:  # overlapping: the same disruption
            known[-1] = known[-1][0], max(known[-1][1], one.at)
        else:
            known.append((one.since, one.at))
    for reason, found in spans.items():
        since, at = max(found, key=lambda span: span[1] - span[0])
        lasted = at - since >= _MOMENT_SECONDS
        when = f"from {since:.1f} to {at:.1f} s" if lasted else f"at {since:.1f} s"
        yield f"{reason} {when}{more_text(len(found))}"


def _wrong_sum_reasons(wrong: Sequence[WrongSum]) -> Iterator[str]:
    if wrong:
        first = wrong[0]
        more = more_text(len(wrong))
        yield f"a sum of masked updates was wrong at {first.at:.1f} s ({first.senders}){more}"


def more_text(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""


def _time_text(part: Sequence[HostSample], whole: Sequence[HostSample]) -> str:
    return f"{_seconds(part):.0f} of {_seconds(whole):.0f} s"


def _seconds(samples: Iterable[HostSample]) -> float:
    return sum(sample.seconds for sample in samples)
