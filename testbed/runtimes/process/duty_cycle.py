"""The processes of a run, and their CPU limit: a control loop suspends and resumes each process."""

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

from testbed.errors import HostError
from testbed.host.forkserver import ForkedProgram


class Children(dict[str, psutil.Popen | ForkedProgram]):
    """By component: only the latest process of one that was restarted."""

    def is_alive(self, component: str) -> bool:
        return component in self and self[component].poll() is None


# CPU limit for ordinary processes: a control loop suspends and resumes each one, so that it gets only
# its share of CPU time.
#
# The loop measures the CPU time that each process has really used. Its budget grows by share × elapsed
# time, and shrinks by the CPU time used. While the budget is not positive, the process is suspended. A
# negative budget is carried over, so that no process gets more than its share in the long run. Unused
# budget is lost, as with the kernel's CFS quota, except for a small part that compensates for late
# ticks.

TICK = 0.005
"""Seconds between two decisions, and minimum for which a resumed process runs."""
PERIOD = 0.05
"""A budget is at most share × PERIOD CPU seconds. A process loses no CPU time if a tick is late by less
than PERIOD seconds."""
SCAN = 1.0
"""Seconds between two searches for new child processes."""


def step(budget: float, share: float, elapsed: float, used: float) -> float:
    """Return the new budget; all are in seconds. The process may run while its budget is positive."""
    return min(budget + share * elapsed - used, share * PERIOD)


class DutyCycle:
    """Limiter of processes with their process groups. Its thread starts with the first limit.

    If a process leads a process group (`start_new_session=True`), its children are in that group. If the
    controller is killed, nothing resumes suspended processes. So start them through
    `testbed.host.programs`, which ends them with the controller.
    """

    def __init__(self) -> None:
        self._limited: dict[str, _LimitedGroup] = {}
        self._suspended_s: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="duty-cycle", daemon=True)
        self._failure: Exception | None = None
        """Error that has ended the thread, and with it all limits."""

    def limit(self, name: str, pid: int, share: float) -> None:
        """`share`: of one core (0.25 is a quarter; 2 is two cores), from now on.

        CPU time before does not count. No effect on a process that has ended. Raises ValueError if
        `share` is not positive, RuntimeError after `close`.
        """
        if share <= 0:
            raise ValueError(f"the CPU share of {name} is {share}, expected a number above 0")
        with self._lock:
            if self._closing.is_set():
                raise RuntimeError("the duty cycle is closed")
            if not self._thread.is_alive():
                self._thread.start()
            if earlier := self._limited.pop(name, None):
                earlier.run()
            with contextlib.suppress(psutil.NoSuchProcess):
                limited = _LimitedGroup(pid, share)
                member = limited.adopt(pid)
                member.seen = member.clock()
                self._limited[name] = limited

    def release(self, name: str) -> None:
        """Resumes a suspended process."""
        with self._lock:
            if limited := self._limited.pop(name, None):
                limited.run()

    def suspended_s(self, name: str) -> float:
        """Total seconds without budget."""
        return self._suspended_s[name]

    def is_suspended(self, name: str) -> bool:
        """Suspended now, because it has no budget."""
        limited = self._limited.get(name)
        return limited is not None and limited.suspended

    def check(self) -> None:
        """Raise HostError if an error has ended the thread that enforces the limits."""
        if self._failure is not None:
            error = self._failure
            raise HostError(f"the CPU limits of the devices ended: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Remove all limits, and end the thread. Idempotent."""
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
        except Exception as error:  # noqa: BLE001  (`check` raises it in the main thread)
            self._failure = error
        finally:  # no process stays suspended, whatever ends this thread
            with self._lock:
                self._closing.set()
                for limited in self._limited.values():
                    limited.run()
                self._limited.clear()

    def _tick(self, elapsed: float) -> None:
        for name, limited in list(self._limited.items()):
            if limited.suspended:
                self._suspended_s[name] += elapsed
            limited.budget = step(limited.budget, limited.share, elapsed, limited.cpu_used())
            if not limited.members:
                del self._limited[name]
            elif limited.budget > 0:
                limited.run()
            else:
                limited.suspend()

    def _adopt_children(self) -> None:
        """Add processes that have joined a limited group, by one cheap system call per process."""
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
    """CPU seconds that are already charged to the budget."""


@dataclass(slots=True)
class _LimitedGroup:
    pid: int
    """Process that leads the group."""
    share: float
    """CPU share of the group; 1 is one core."""
    budget: float = 0.0
    """CPU seconds that the group may use."""
    suspended: bool = False
    members: dict[int, _Member] = field(default_factory=dict)

    def adopt(self, pid: int) -> _Member:
        """CPU time so far will be charged to the group. Raises psutil.NoSuchProcess."""
        process = psutil.Process(pid)
        self.members[pid] = _Member(process, cpu_clock(process))
        return self.members[pid]

    def cpu_used(self) -> float:
        """CPU seconds since the last call. Members that have ended are removed."""
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
    """Return a function that returns the CPU seconds of `process`, or raises psutil.NoSuchProcess.

    It reads the POSIX clock of the process, which counts nanoseconds, 50 times cheaper than psutil's
    cpu_times(), whose ticks are 10 ms. If the C library lacks that clock (macOS), it uses cpu_times(),
    which is precise there.
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
