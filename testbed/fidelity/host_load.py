"""Load of this host before and during a run, and the repetition of measurements that other work
disturbs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from agents.texts import quantity
from testbed.host import cpus
from testbed.host.cpus import CpuReading

_COUNTED = 0.5
"""Minimum share of the elapsed time that the kernel's counters must account for to be used: a counter
may step back."""
_NICE_FIELD = 16
"""Index in `/proc/<pid>/stat`, from 0 after the name."""
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """Loads of this host since the previous sample, from 0 to 1; None if unknown."""

    at: float
    """End in seconds of the run."""
    seconds: float
    """Length in seconds of device time."""
    server_load: float | None
    """Share of time in which the busiest thread of broker, aggregator and router ran or waited for a
    CPU, without threads of low priority (evaluations)."""
    foreign: float | None
    """Load of the devices' CPUs by processes other than the devices. Servers and controller do not
    count, even if they share these CPUs."""
    elsewhere: float | None
    """Load of all CPUs of this host by processes other than the run and its controller."""
    device_busy: float
    steal: float
    """Share of CPU time that the hypervisor gave to other guests."""
    tick_lateness: float
    """Largest lateness of the controller's timers, in seconds."""


def summary(samples: Sequence[HostSample]) -> dict[str, float | None]:
    """Return the manifest's entry: the mean of each load, and the largest lateness of a timer in
    seconds."""
    names = ("server_load", "foreign", "elsewhere", "device_busy", "steal")
    latest = max((sample.tick_lateness for sample in samples), default=None)
    means = {name: mean(samples, name) for name in names}
    rounded = {name: None if value is None else round(value, 4) for name, value in means.items()}
    return {**rounded, "tick_lateness": latest}


def mean(samples: Iterable[HostSample], name: str) -> float | None:
    """Mean over the time in which the load is known; None if it never is."""
    known = [(value, one.seconds) for one in samples if (value := getattr(one, name)) is not None]
    seconds = sum(duration for _, duration in known)
    return sum(value * duration for value, duration in known) / seconds if seconds else None


class FreeCores:
    """Measurement of the free share of CPUs before a run, from now on. This process does not count."""

    QUIET_SECONDS, SECONDS, LONGEST = 0.5, 2.0, 5.0
    """Seconds before a host can be called quiet, before it can be called busy, and at most, if the
    kernel's counters lag behind."""
    _QUIET, _BUSY = 0.05, 0.2

    def __init__(self, cpus: Set[int]) -> None:
        self._cpus = cpus
        self._sampler = Sampler(cpus, cpus, own=lambda: 0.0)
        self._begin = time.monotonic()
        self._sampler.sample(self._begin, 0.0)

    def expectation(self) -> str:
        """Wait until enough time has passed; return a sentence."""
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
            return "The load of this host is unknown: the kernel's counters do not show it"
        cores = quantity(len(self._cpus), "core")
        facts = f"other work uses {foreign:.0%} of the run's {cores}"
        if steal >= 0.01:
            facts += f", the hypervisor takes {steal:.0%}"
        if max(foreign, steal) < self._QUIET:
            return f"Quiet host: {facts}"
        if max(foreign, steal) < self._BUSY:
            return f"Not quite quiet: {facts}. The run may not be valid"
        return f"Busy host: {facts}. The run will probably not be valid: wait until other work is done"


class Sampler:
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
        """`cpus`, `devices`: numbers of the run's and of the devices' CPUs. `servers` returns the
        process ids of broker, aggregator and router. `own` returns the CPU seconds that all devices have
        used. `read` returns the counters of each CPU. `dilation`: host seconds per second of device
        time. `controlled`: whether this process runs on the CPUs of the run, too."""
        self._sets = (cpus, devices)
        self._servers = servers
        self._own = own
        self._read = read
        self._proc = proc
        self._dilation = dilation
        self._controlled = controlled
        self._before: _CountersAt | None = None

    def sample(self, at: float, tick_lateness: float) -> HostSample | None:
        """None at the first call. `at`: seconds of the run. `tick_lateness`: of the controller's timers,
        in seconds."""
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
            # If both sets are equal, the servers run on the devices' CPUs.
            foreign = _foreign_share(devices, used + servers * (cpus == of_devices))
            elsewhere = _foreign_share(host, used + servers)
        return HostSample(
            at=at,
            seconds=at - before.at,
            server_load=max(loads, default=None),
            foreign=foreign,
            elsewhere=elsewhere,
            device_busy=1.0 - _share(devices.idle, devices) if devices.total > 0 else 0.0,
            # Lagging counters may have counted stolen time already, but not yet the elapsed time.
            steal=_share(run.steal, run._replace(total=max(run.total, elapsed * len(self._sets[0])))),
            tick_lateness=tick_lateness,
        )

    def _look(self, at: float) -> _CountersAt:
        counters = self._read()
        run, devices = (
            _times(counters[number] for number in numbers & counters.keys()) for numbers in self._sets
        )
        host, threads = _times(counters.values()), dict(self._demands())
        used, servers = self._own(), self._servers_used()
        return _CountersAt(at, run, devices, host, threads, used, servers, frozenset(counters))

    def _servers_used(self) -> float:
        """CPU seconds of the servers and, if `controlled`, of this process."""
        seconds = time.process_time() if self._controlled else 0.0
        for pid in self._servers():
            with contextlib.suppress(psutil.Error):
                spent = psutil.Process(pid).cpu_times()
                seconds += spent.user + spent.system
        return seconds

    def _demands(self) -> Iterator[tuple[str, float]]:
        """Yield each thread of the servers, with the seconds in which it ran or waited for a CPU, but
        for evaluations, which have a higher niceness than the process's other threads."""
        for pid in self._servers():
            try:
                threads = list((self._proc / str(pid) / "task").iterdir())
            except OSError:  # the process has ended
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
    """Seconds since the host's boot, from `/proc/stat`."""

    user: float
    nice: float
    system: float
    idle: float
    iowait: float
    irq: float
    softirq: float
    steal: float


def cpu_times(stat: str, ticks: int = 100) -> dict[int, CpuTimes]:
    """Parse `/proc/stat`; CPUs that are offline are left out. `ticks`: per second, 100 on every
    Linux."""
    lines = (line.split() for line in stat.splitlines())
    return {
        int(fields[0].removeprefix("cpu")): CpuTimes(*(int(field) / ticks for field in fields[1:9]))
        for fields in lines
        if fields[0].startswith("cpu") and fields[0] != "cpu"
    }


def _counters() -> Mapping[int, Any]:
    """Return CPU number -> counters, for each CPU of this host. On Linux psutil is not used, because
    psutil lists online CPUs by position and not by number."""
    try:
        return cpu_times(_STAT.read_text(encoding="ascii"))
    except OSError:  # not Linux
        return dict(enumerate(psutil.cpu_times(percpu=True)))


class _Times(NamedTuple):
    """CPU seconds since the host's boot, summed over some CPUs."""

    total: float
    idle: float
    steal: float


class _CountersAt(NamedTuple):
    at: float
    """Seconds of the run."""
    run: _Times
    devices: _Times
    host: _Times
    threads: dict[str, float]
    """Seconds in which each thread of the servers ran or waited for a CPU."""
    used: float | None
    """CPU seconds of all devices; None if unknown."""
    servers: float
    """CPU seconds of broker, aggregator, router and controller."""
    cpus: frozenset[int]


def _foreign_share(spent: _Times, own: float) -> float:
    """`own`: CPU seconds of processes that are not foreign."""
    return _share(spent.total - spent.idle - spent.steal - own, spent)


def _share(part: float, spent: _Times) -> float:
    """Clipped to 0 to 1, because the kernel's counters may step back."""
    return min(1.0, max(0.0, part / spent.total)) if spent.total > 0 else 0.0


def _times(cpus: Iterable[Any]) -> _Times:
    total = idle = steal = 0.0
    for cpu in cpus:
        values = cpu._asdict()
        # The time of guests is included in `user` and `nice`.
        total += sum(value for name, value in values.items() if not name.startswith("guest"))
        idle += values.get("idle", 0.0) + values.get("iowait", 0.0)
        steal += values.get("steal", 0.0)
    return _Times(total, idle, steal)


PAUSES = (2.0, 5.0, 10.0)
"""Seconds before each repetition."""
_BUSY_CORES, _BUSY_SHARE = 0.1, 0.05
"""Use by others above which a host is busier than its plan, which gives them nothing: in cores of this
host, and as a share of another host's cores."""
_NAMED = 3
"""Maximum number of programs that a sentence names."""


@dataclass(frozen=True, slots=True)
class OtherWork:
    """Work on a host that is not of the run."""

    text: str
    """Programs and their use, such as `others use 1.3 of 2 cores: python3 (1234) 0.9`."""
    is_busy: bool | None
    """True if the host is busier than its plan; None if its load is unknown."""


def on_this_host(before: CpuReading, now: CpuReading, groups: Collection[str], cores: int) -> OtherWork:
    """`groups`: names in the paths of the run's control groups. `cores`: of this host."""
    used = cpus.used_between(before, now, cpus.is_of_run(now, groups))
    return from_seconds(used, now.at - before.at, cores)


def from_seconds(used: Mapping[str, float], seconds: float, cores: int) -> OtherWork:
    """`used`: CPU seconds of programs, the largest first."""
    total = math.fsum(used.values()) / seconds
    named = [f"{name} {one / seconds:.2g}" for name, one in [*used.items()][:_NAMED]]
    who = f": {', '.join(named)}" if total > _BUSY_CORES else ""
    return OtherWork(f"others use {total:.2g} of {cores} cores{who}", total > _BUSY_CORES)


def on_another_host(host: str, sample: HostSample | None) -> OtherWork:
    """Return the other work on another host, by its counters, which do not name programs. `sample`: None
    if they have not been read twice yet."""
    if sample is None or sample.foreign is None:
        return OtherWork(f"the load of {host} is not known", None)
    share = sample.foreign + sample.steal
    return OtherWork(f"others use {share:.0%} of {host} (not known who)", share > _BUSY_SHARE)


def pause(count: int, work: Sequence[OtherWork]) -> float | None:
    """Seconds before a wrong measurement is repeated; None if it was made often enough, or no host was
    busy, so that nothing but the testbed can be the cause. `count`: measurements so far. `work`: on each
    host during the last one."""
    if count > len(PAUSES) or all(one.is_busy is False for one in work):
        return None
    return PAUSES[count - 1]
