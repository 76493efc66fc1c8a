"""CPU limit for ordinary processes: suspended and resumed so that each gets its share of one core.

A closed loop on the CPU time that a process has really used: a budget grows by share × elapsed time
and shrinks by what was used; without budget the process is suspended. What was overdrawn is carried
over, so in the long run no process gets more than its share; what was not used is not saved up (as in
the kernel's CFS quota), beyond the little that makes up for ticks that come late.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

TICK = 0.005
"""Seconds between two decisions. A resumed process runs for at least as long."""
PERIOD = 0.05
"""Seconds of share that an idle process may save up. Ticks no farther apart than this cost no share."""
SCAN = 1.0
"""Seconds between two looks for new children."""


def step(budget: float, share: float, elapsed: float, used: float) -> float:
    """Return the new budget, in CPU seconds, after `elapsed` wall seconds in which `used` were consumed.

    The process may run while it is positive.
    """
    return min(budget + share * elapsed - used, share * PERIOD)


class DutyCycle:
    """One thread, from the first limit on, that limits any number of processes, each with all of its
    process group.

    The group is where the children are, if the process leads one (`start_new_session=True`).
    Should the controller be killed, nothing is left to resume what is suspended: start the processes
    through `testbed.host.die_with_parent`, which ends them with the controller.
    """

    def __init__(self) -> None:
        self._limited: dict[str, _Limited] = {}
        self._suspended_s: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="duty-cycle", daemon=True)

    def limit(self, name: str, pid: int, share: float) -> None:
        """Give process `pid` from now on `share` of one core (0.25 is a quarter; 2 is two cores).

        What it used before does not count. A process that has ended already is left alone.
        Raises ValueError for a share that is not positive, RuntimeError after close().
        """
        if share <= 0:
            raise ValueError(f"a CPU share of {share} would stop {name} for ever")
        with self._lock:
            if self._closing.is_set():
                raise RuntimeError("this DutyCycle is closed")
            if not self._thread.is_alive():
                self._thread.start()
            if earlier := self._limited.pop(name, None):
                earlier.run()
            with contextlib.suppress(psutil.NoSuchProcess):
                limited = _Limited(pid, share)
                member = limited.adopt(pid)
                member.seen = member.clock()
                self._limited[name] = limited

    def release(self, name: str) -> None:
        """Lift the limit of `name`, resuming it if need be; no limit is no error."""
        with self._lock:
            if limited := self._limited.pop(name, None):
                limited.run()

    def suspended_s(self, name: str) -> float:
        """For how long `name` was suspended so far, in seconds: it had used up its budget."""
        return self._suspended_s[name]

    def suspends(self, name: str) -> bool:
        """Whether `name` is suspended just now."""
        limited = self._limited.get(name)
        return limited is not None and limited.suspended

    def close(self) -> None:
        """Lift every limit and end the thread. Idempotent."""
        self._closing.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def _loop(self) -> None:
        last = scanned = time.monotonic()
        try:
            while not self._closing.wait(TICK):
                now = time.monotonic()
                with self._lock:
                    self._tick(now - last)
                    if now - scanned >= SCAN:
                        self._adopt_children()
                        scanned = now
                last = now
        finally:  # whatever ends this thread, no process stays suspended
            with self._lock:
                self._closing.set()
                for limited in self._limited.values():
                    limited.run()
                self._limited.clear()

    def _tick(self, elapsed: float) -> None:
        for name, limited in list(self._limited.items()):
            if limited.suspended:
                self._suspended_s[name] += elapsed
            limited.budget = step(limited.budget, limited.share, elapsed, limited.used())
            if not limited.members:
                del self._limited[name]
            elif limited.budget > 0:
                limited.run()
            else:
                limited.suspend()

    def _adopt_children(self) -> None:
        """Find the processes that joined a limited process's group: one cheap system call for each."""
        groups = {limited.pid: limited for limited in self._limited.values() if not limited.suspended}
        for pid in psutil.pids() if groups else ():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if (limited := groups.get(os.getpgid(pid))) and pid not in limited.members:
                    limited.adopt(pid)


@dataclass(slots=True)
class _Member:
    process: psutil.Process
    clock: Callable[[], float]
    seen: float = 0.0
    """CPU seconds that are already accounted for."""


@dataclass(slots=True)
class _Limited:
    """A process and its group."""

    pid: int
    share: float
    budget: float = 0.0
    suspended: bool = False
    members: dict[int, _Member] = field(default_factory=dict)

    def adopt(self, pid: int) -> _Member:
        """Take in a process; all that it has used so far is charged. Raises psutil.NoSuchProcess."""
        process = psutil.Process(pid)
        self.members[pid] = _Member(process, cpu_clock(process))
        return self.members[pid]

    def used(self) -> float:
        """CPU seconds since the last call; forgets members that have ended."""
        total = 0.0
        for pid, member in list(self.members.items()):
            try:
                now = member.clock()
            except psutil.NoSuchProcess:
                del self.members[pid]
                continue
            total += now - member.seen
            member.seen = now
        return total

    def run(self) -> None:
        if self.suspended:
            self.suspended = False
            self._each(psutil.Process.resume)

    def suspend(self) -> None:
        if not self.suspended:
            self.suspended = True
            self._each(psutil.Process.suspend)

    def _each(self, signal: Callable[[psutil.Process], None]) -> None:
        # psutil, not os.kill: it checks that the pid still means the same process.
        for member in self.members.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                signal(member.process)


def cpu_clock(process: psutil.Process) -> Callable[[], float]:
    """A function that returns the CPU seconds of `process`; it raises psutil.NoSuchProcess.

    POSIX has a clock per process: nanoseconds, where psutil's cpu_times() counts ticks of 10 ms, and
    50 times cheaper to read. Where the C library lacks it (macOS), psutil is precise itself.
    """
    try:
        find_clock = ctypes.CDLL(None).clock_getcpuclockid
    except AttributeError:
        return lambda: sum(process.cpu_times()[:2])
    clock = ctypes.c_int()
    if find_clock(process.pid, ctypes.byref(clock)):
        raise psutil.NoSuchProcess(process.pid)

    def read() -> float:
        try:
            return time.clock_gettime(clock.value)
        except OSError as error:
            raise psutil.NoSuchProcess(process.pid) from error

    return read
