"""Load of this host during a run, sampled from the kernel's counters."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from agents.texts import quantity

_COUNTED = 0.5
"""Of the time that has gone, so much at least has to be in the kernel's counters, which may step back:
else they tell nothing."""
_NICE_FIELD = 16
"""Of `/proc/<pid>/stat`, counted from 0 after the name."""
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """The load of this host since the sample before. Loads are from 0 to 1."""

    at: float
    """When it ended, in seconds of the run."""
    seconds: float
    """How long it was."""
    server_load: float | None
    """Share of the time in which the busiest thread of broker, aggregator or router ran or waited for a
    CPU, without those of low priority (evaluations). None: unknown."""
    foreign: float | None
    """Load of the devices' CPUs that is not from devices, nor from the run's servers and controller
    where these have no core of their own. None: unknown."""
    elsewhere: float | None
    """Load of all CPUs of this host that is neither from the run nor from the controller. None:
    unknown."""
    device_busy: float
    """Load of the CPUs of the devices, whoever it is from."""
    steal: float
    """Share of the CPUs' time that the hypervisor gave to others."""
    tick_lateness: float
    """The most by which the controller overslept, in seconds."""


def summary(samples: Sequence[HostSample]) -> dict[str, float | None]:
    """For the manifest: means over the run, and the latest timer."""
    names = ("server_load", "foreign", "elsewhere", "device_busy", "steal")
    latest = max((sample.tick_lateness for sample in samples), default=None)
    means = {name: mean(samples, name) for name in names}
    rounded = {name: None if value is None else round(value, 4) for name, value in means.items()}
    return {**rounded, "tick_lateness": latest}


def mean(samples: Iterable[HostSample], name: str) -> float | None:
    """The mean over time of the load `name`, where it is known; None where it never is."""
    known = [(value, one.seconds) for one in samples if (value := getattr(one, name)) is not None]
    seconds = sum(duration for _, duration in known)
    return sum(value * duration for value, duration in known) / seconds if seconds else None


class FreeCores:
    """How much of some CPUs is free before a run, from its making on; what this process uses itself is
    not counted."""

    QUIET_SECONDS, SECONDS, LONGEST = 0.5, 2.0, 5.0
    """How long it takes to tell that a host is quiet, and how busy it is; and at most, where the
    kernel's counters lag behind."""
    _QUIET, _BUSY = 0.05, 0.2

    def __init__(self, cpus: Set[int]) -> None:
        self._cpus = cpus
        self._sampler = Sampler(cpus, cpus, own=lambda: 0.0)
        self._begin = time.monotonic()
        self._sampler.sample(self._begin, 0.0)

    def expectation(self) -> str:
        """A sentence on what a run may expect of them. Waits until enough time has gone."""
        foreign, steal = None, 0.0
        gone = time.monotonic() - self._begin
        later = (one for one in (self.SECONDS, self.LONGEST) if one >= gone + self.QUIET_SECONDS)
        for seconds in (max(gone, self.QUIET_SECONDS), *later):
            time.sleep(max(0.0, self._begin + seconds - time.monotonic()))
            if (sample := self._sampler.sample(time.monotonic(), 0.0)) is not None:
                foreign, steal = sample.foreign, sample.steal
            if foreign is not None and (seconds >= self.SECONDS or max(foreign, steal) < self._QUIET):
                break
        if foreign is None:
            return "How busy this host is cannot be told from the kernel's counters"
        cores = quantity(len(self._cpus), "core")
        facts = f"other work uses {foreign:.0%} of the run's {cores}"
        if steal >= 0.01:
            facts += f", the hypervisor takes {steal:.0%}"
        if max(foreign, steal) < self._QUIET:
            return f"Quiet host: {facts}"
        if max(foreign, steal) < self._BUSY:
            return f"Not quite quiet: {facts}. The run may turn out not valid"
        return f"Busy host: {facts}. The run will probably not be valid; better wait until that is done"


class Sampler:
    """Takes HostSamples from the kernel's counters."""

    def __init__(
        self,
        cpus: Set[int],
        devices: Set[int],
        servers: Callable[[], Iterable[int]] = tuple,
        own: Callable[[], float | None] = lambda: None,
        read: Callable[[], Mapping[int, Any]] = lambda: _counters(),
        proc: Path = Path("/proc"),
        dilation: float = 1.0,
        *,
        controlled: bool = True,
    ) -> None:
        """The CPUs of the run and those of its devices, by number; `servers` gives the process ids of
        broker, aggregator and router, `own` the CPU seconds that all devices have used, `read` the
        counters of each CPU, by number; `controlled`: whether this process runs there, too."""
        self._sets = (cpus, devices)
        self._servers = servers
        self._own = own
        self._read = read
        self._proc = proc
        self._dilation = dilation
        self._controlled = controlled
        self._before: _Look | None = None

    def sample(self, at: float, tick_lateness: float) -> HostSample | None:
        """The load since the last call, at `at` seconds of the run; None the first time."""
        before, now = self._before, self._look(at)
        self._before = now
        if before is None or at <= before.at:
            return None
        run, devices, host = (
            _Times(*(b - a for a, b in zip(*pair, strict=True)))
            for pair in ((before.run, now.run), (before.devices, now.devices), (before.host, now.host))
        )
        elapsed = (at - before.at) * self._dilation
        known = now.threads.keys() & before.threads
        loads = [min(1.0, (now.threads[one] - before.threads[one]) / elapsed) for one in known]
        foreign = elsewhere = None
        seen = frozenset().union(*self._sets) <= now.cpus == before.cpus
        counted = seen and host.total >= _COUNTED * elapsed * len(now.cpus)
        if counted and now.used is not None and before.used is not None:
            used, servers = now.used - before.used, now.servers - before.servers
            cpus, of_devices = self._sets
            foreign = _other(devices, used + servers * (cpus == of_devices))  # the run has one core
            elsewhere = _other(host, used + servers)
        return HostSample(
            at=at,
            seconds=at - before.at,
            server_load=max(loads, default=None),
            foreign=foreign,
            elsewhere=elsewhere,
            device_busy=1.0 - _share(devices.idle, devices) if devices.total > 0 else 0.0,
            # Counters that lag behind have less of the time that has gone than of what was stolen.
            steal=_share(run.steal, run._replace(total=max(run.total, elapsed * len(self._sets[0])))),
            tick_lateness=tick_lateness,
        )

    def _look(self, at: float) -> _Look:
        counters = self._read()
        run, devices = (
            _times(counters[number] for number in numbers & counters.keys()) for numbers in self._sets
        )
        host, threads = _times(counters.values()), dict(self._demands())
        used, servers = self._own(), self._servers_used()
        return _Look(at, run, devices, host, threads, used, servers, frozenset(counters))

    def _servers_used(self) -> float:
        """CPU seconds of the servers and of this process."""
        seconds = time.process_time() if self._controlled else 0.0
        for pid in self._servers():
            with contextlib.suppress(psutil.Error):
                spent = psutil.Process(pid).cpu_times()
                seconds += spent.user + spent.system
        return seconds

    def _demands(self) -> Iterator[tuple[str, float]]:
        """Of each of the servers' threads: seconds in which it ran or waited for a CPU. Evaluations have
        a lower priority than the rest of their process, whatever that has: all of a run may be niced."""
        for pid in self._servers():
            try:
                threads = list((self._proc / str(pid) / "task").iterdir())
            except OSError:  # it has ended
                continue
            found: list[tuple[int, str, float]] = []
            for thread in threads:
                try:
                    nice = (thread / "stat").read_text().rpartition(")")[2].split()[_NICE_FIELD]
                    ran, waited, _ = (thread / "schedstat").read_text().split()
                except (OSError, ValueError, IndexError):
                    continue
                found.append((int(nice), str(thread), (int(ran) + int(waited)) / 1e9))
            usual = min((nice for nice, _, _ in found), default=0)
            yield from ((name, seconds) for nice, name, seconds in found if nice == usual)


class CpuTimes(NamedTuple):
    """Seconds of one CPU since its host's boot, by the kernel's `/proc/stat`."""

    user: float
    nice: float
    system: float
    idle: float
    iowait: float
    irq: float
    softirq: float
    steal: float


def cpu_times(stat: str, ticks: int = 100) -> dict[int, CpuTimes]:
    """Those of each CPU in the text of `/proc/stat`, by number, which counts in `ticks` a second: 100 on
    every Linux. CPUs that are offline are not in it."""
    lines = (line.split() for line in stat.splitlines())
    return {
        int(fields[0].removeprefix("cpu")): CpuTimes(*(int(field) / ticks for field in fields[1:9]))
        for fields in lines
        if fields[0].startswith("cpu") and fields[0] != "cpu"
    }


def _counters() -> Mapping[int, Any]:
    """Of each CPU of this host, by number: psutil's list has the places of those that are online."""
    try:
        return cpu_times(_STAT.read_text(encoding="ascii"))
    except OSError:  # no Linux
        return dict(enumerate(psutil.cpu_times(percpu=True)))


class _Times(NamedTuple):
    """Seconds since this host's boot, summed over some CPUs."""

    total: float
    idle: float
    steal: float


class _Look(NamedTuple):
    """Counters at one moment."""

    at: float
    run: _Times
    """CPUs of the run, of its devices, and all of this host."""
    devices: _Times
    host: _Times
    threads: dict[str, float]
    used: float | None
    """CPU seconds of all devices."""
    servers: float
    """CPU seconds of broker, aggregator, router and controller."""
    cpus: frozenset[int]
    """Those of this host that are online."""


def _other(spent: _Times, own: float) -> float:
    """The share of what was `spent` on some CPUs that is not `own`."""
    return _share(spent.total - spent.idle - spent.steal - own, spent)


def _share(part: float, spent: _Times) -> float:
    """The kernel's counters may step back a little."""
    return min(1.0, max(0.0, part / spent.total)) if spent.total > 0 else 0.0


def _times(cpus: Iterable[Any]) -> _Times:
    total = idle = steal = 0.0
    for cpu in cpus:
        values = cpu._asdict()
        # A guest's time is in `user` and `nice` already.
        total += sum(value for name, value in values.items() if not name.startswith("guest"))
        idle += values.get("idle", 0.0) + values.get("iowait", 0.0)
        steal += values.get("steal", 0.0)
    return _Times(total, idle, steal)
