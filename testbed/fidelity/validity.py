"""Whether a run can be believed: an experiment that lies is worse than none.

Like the emulation, the host can fail to keep up. What it was busy with, what came late and what the
devices really got is held against thresholds; a run that passes one is not valid, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil

from testbed.fidelity.figures import CPU, RATES, Fidelity, Worst

_FULL = 0.95
"""Busy, of a second: what is left is what the kernel and the sampling itself lose."""
_FULL_TIME = 0.2
"""Of a run: now and then anything fills the server's core, and only some updates fall into that."""
_FULL_SECONDS = 3.0
"""In a short run some seconds of start and end are many per cent."""
_STEAL = 0.05
"""Of the CPU time: many a kernel charges it to the device that was running, so that no figure of a
device shows it."""
_LATE = 0.25
"""Seconds: as late as this, the process runtime has left devices suspended or running for several of its
periods, and stamps of time are off by as much as a training may take."""
_LATE_TIME = 0.05
"""Of a run: single hiccups come from anything, a cron job will do."""
_STALL = 2.0
"""Seconds: the machine was paused or asleep. No device was, as far as the experiment's clock knows."""
_CPU_ERROR = 10.0
"""%: the emulation holds shares to 1 %, and pauses may take up to 10 off a figure (testbed.fidelity)."""
_LINK_ERROR = 10.0
"""%: queues and TCP's start cost a probe some per cent of the rate."""
FAILED_LINK = 25.0
"""%: no run starts on a link whose rate is as far off as that. A busy host does less to it: beside
twice as many busy processes as there are cores, rates were within 1 %. Round trips it may well hold up:
once, one of 80 ms took 44 % more."""
_STEP_LATE = 0.5
"""Seconds: a change of many devices takes some tenths, and samples of what it did are a second apart."""


@dataclass(frozen=True, slots=True)
class HostSample:
    """This host since the sample before. Loads are from 0 to 1."""

    at: float
    """When it ended, in seconds of the run."""
    seconds: float
    """How long it was."""
    infrastructure_busy: float
    """Of the CPUs of broker and aggregator: evaluations and other work that gives way (nice) is none."""
    device_busy: float
    """Of the CPUs of the devices. Here niceness does not matter: it counts within a container alone."""
    steal: float
    """Of all of these: what the hypervisor gave to others."""
    tick_lateness: float
    """The most that the controller slept longer than it meant to, in seconds."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step of the scenario, once it has been done."""

    what: str
    """As in `set of pi-1`."""
    due: float
    """Device time in seconds."""
    done: float


@dataclass(frozen=True, slots=True)
class Validity:
    valid: bool
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {"valid": self.valid, "reasons": list(self.reasons)}


@dataclass(frozen=True, slots=True)
class Judgement:
    """How well a run was emulated, as far as it came."""

    fidelity: Fidelity
    validity: Validity
    steps: tuple[StepDone, ...]
    """Of the scenario."""


def verdict(
    host: Sequence[HostSample],
    fidelity: Fidelity | None = None,
    steps: Iterable[StepDone] = (),
    failures: Sequence[str] = (),
) -> Validity:
    """Whether the run can be believed, from samples taken while its clock went, and what was to be done
    in it and could not be. No samples, figures or steps say nothing against it."""
    reasons = [*_server(host), *_stolen(host), *_late(host)]
    if fidelity is not None:
        reasons += _shares(fidelity, host)
        if (doubt := link_doubt(fidelity)) is not None:
            reasons.append(doubt)
    reasons += _late_steps(steps)
    if failures:
        reasons.append(f"{failures[0]}{_others(len(failures))}")
    return Validity(not reasons, tuple(reasons))


def _server(host: Sequence[HostSample]) -> Iterator[str]:
    full = [sample for sample in host if sample.infrastructure_busy >= _FULL]
    if _seconds(full) >= max(_FULL_SECONDS, _FULL_TIME * _seconds(host)) and full:
        busy = sum(s.infrastructure_busy * s.seconds for s in full) / _seconds(full)
        yield (
            f"the aggregator's and broker's cores were {busy:.0%} busy for {_of(full, host)}: "
            "updates may have waited for the server"
        )


def _stolen(host: Sequence[HostSample]) -> Iterator[str]:
    steal = sum(s.steal * s.seconds for s in host) / (_seconds(host) or 1.0)
    if steal > _STEAL:
        yield (
            f"the hypervisor took {steal:.0%} of this machine's CPU time: devices were slower than "
            "their shares say"
        )


def _late(host: Sequence[HostSample]) -> Iterator[str]:
    worst = max(host, key=lambda sample: sample.tick_lateness, default=None)
    late = [sample for sample in host if sample.tick_lateness > _LATE]
    if worst is not None and worst.tick_lateness > _STALL:
        yield (
            f"this host stood still for {worst.tick_lateness:.1f} s at {worst.at:.0f} s, while the "
            "run's clock went on"
        )
    elif worst is not None and _seconds(late) > _LATE_TIME * _seconds(host):
        yield (
            f"timers came up to {worst.tick_lateness:.2g} s late, in {_of(late, host)}: the host could "
            "not keep up"
        )


def _shares(fidelity: Fidelity, host: Sequence[HostSample]) -> Iterator[str]:
    off, worst = _beyond(fidelity, (CPU,), _CPU_ERROR)
    if worst is None:
        return
    reason = (
        f"{worst.device.device} got {worst.figure.got:.3g} of a core where {worst.figure.asked:.3g} was "
        f"asked, {worst.off}{_others(off)}"
    )
    full = [sample for sample in host if sample.device_busy >= _FULL]
    if full and worst.error < 0:
        reason += f"; the devices' cores were full for {_of(full, host)}"
    yield reason


def link_doubt(
    fidelity: Fidelity, limit: float = _LINK_ERROR, names: tuple[str, ...] = (*RATES, "rtt")
) -> str | None:
    """Whose link is farther off than `limit` (%) in the figures `names`, if any."""
    titles = {"up": "uplink", "down": "downlink", "rtt": "round trip"}
    off, worst = _beyond(fidelity, names, limit)
    if worst is None:
        return None
    return f"the {titles[worst.name]} of {worst.device.device} was {worst.off} than asked{_others(off)}"


def _beyond(fidelity: Fidelity, names: tuple[str, ...], limit: float) -> tuple[int, Worst | None]:
    """How many devices are farther off than `limit` (%), and the worst of them."""
    off = sum(
        any(name in names and figure.distance > limit for name, figure in one.judged())
        for one in fidelity.devices
    )
    return off, fidelity.worst(*names) if off else None


def _late_steps(steps: Iterable[StepDone]) -> Iterator[str]:
    late = [step for step in steps if step.done - step.due > _STEP_LATE]
    if late:
        worst = max(late, key=lambda step: step.done - step.due)
        yield (
            f"the scenario's step at {worst.due:g} s ({worst.what}) came {worst.done - worst.due:.1f} s "
            f"late{_others(len(late))}"
        )


def _others(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""


def _of(part: Sequence[HostSample], whole: Sequence[HostSample]) -> str:
    return f"{_seconds(part):.0f} of {_seconds(whole):.0f} s"


def _seconds(samples: Iterable[HostSample]) -> float:
    return sum(sample.seconds for sample in samples)


class _Times(NamedTuple):
    """Seconds since this host's boot, summed over some CPUs."""

    total: float
    idle: float
    nice: float
    steal: float


class Sampler:
    """Takes a HostSample each time it is asked: one look at the kernel's counters."""

    def __init__(
        self,
        infrastructure: Set[int],
        devices: Set[int],
        read: Callable[[], Sequence[Any]] = lambda: psutil.cpu_times(percpu=True),
    ) -> None:
        """The CPUs of broker and aggregator, and those of the devices, by number."""
        self._sets = (infrastructure, devices, infrastructure | devices)
        self._read = read
        self._at: float | None = None
        self._before: list[_Times] = []

    def sample(self, at: float, tick_lateness: float) -> HostSample | None:
        """What happened since the last call, at `at` seconds of the run; None the first time."""
        cpus = self._read()
        now = [_times([cpus[n] for n in numbers if n < len(cpus)]) for numbers in self._sets]
        last, before = self._at, self._before
        self._at, self._before = at, now
        if last is None:
            return None
        spent = [
            _Times(*(b - a for a, b in zip(*pair, strict=True)))
            for pair in zip(before, now, strict=True)
        ]
        server, devices, all_of_them = spent
        return HostSample(
            at,
            at - last,
            _busy(server, server.idle + server.nice),
            _busy(devices, devices.idle),
            _share(all_of_them.steal, all_of_them),
            tick_lateness,
        )


def _busy(spent: _Times, free: float) -> float:
    return 1.0 - _share(free, spent) if spent.total > 0 else 0.0


def _share(part: float, spent: _Times) -> float:
    """The kernel's counters may step back a little."""
    return min(1.0, max(0.0, part / spent.total)) if spent.total > 0 else 0.0


def _times(cpus: Iterable[Any]) -> _Times:
    total = idle = nice = steal = 0.0
    for cpu in cpus:
        values = cpu._asdict()
        # A guest's time is in `user` and `nice` already.
        total += sum(value for name, value in values.items() if not name.startswith("guest"))
        idle += values.get("idle", 0.0) + values.get("iowait", 0.0)
        nice += values.get("nice", 0.0)
        steal += values.get("steal", 0.0)
    return _Times(total, idle, nice, steal)
