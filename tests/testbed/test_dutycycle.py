"""The decision on its own, and real busy processes that get the share that was asked for."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from testbed.errors import HostError
from testbed.runtimes.process.duty_cycle import PERIOD, SCAN, DutyCycle, cpu_clock, step
from tests.waiting import eventually

BUSY = "while True: pass"
BUSY_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"

Start = Callable[[str], int]


def test_budget_grows_by_the_share_and_shrinks_by_use() -> None:
    assert step(-0.01, share=0.25, elapsed=0.02, used=0.0) == pytest.approx(-0.005)
    assert step(0.0, share=0.25, elapsed=0.02, used=0.02) == pytest.approx(-0.015)


def test_idle_time_does_not_accumulate() -> None:
    assert step(0.0, share=0.5, elapsed=3600.0, used=0.0) == 0.5 * PERIOD


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("tick", [0.001, 0.02, PERIOD])
def test_long_run_share_is_exact(share: float, tick: float) -> None:
    assert after(10_000, share, tick) == pytest.approx(share * 10_000 * tick, abs=4 * tick + PERIOD)


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0, 2.5])
def test_late_ticks_never_give_more_than_the_share(share: float) -> None:
    assert after(1000, share, tick=1.0) <= share * 1000 + 4


def after(ticks: int, share: float, tick: float) -> float:
    """CPU seconds of a process that is busy on four cores whenever it may run."""
    budget = total = 0.0
    for _ in range(ticks):
        used = 4 * tick if budget > 0 else 0.0
        total += used
        budget = step(budget, share, tick, used)
    return total


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python code in a process of its own group; returns its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True))
        return started[-1].pid

    yield start
    for process in started:
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.wait()


@pytest.fixture
def duty_cycle() -> Iterator[DutyCycle]:
    cycle = DutyCycle()
    yield cycle
    cycle.close()


@pytest.mark.timed
def test_four_busy_processes_get_their_shares(start: Start, duty_cycle: DutyCycle) -> None:
    shares = [0.05, 0.1, 0.2, 0.3]
    pids = [start(BUSY) for _ in shares]
    clocks = [cpu_clock(psutil.Process(pid)) for pid in pids]
    for pid, share in zip(pids, shares, strict=True):
        duty_cycle.limit(str(pid), pid, share)
    begin, before = time.monotonic(), [clock() for clock in clocks]
    time.sleep(4)
    elapsed = time.monotonic() - begin
    got = [clock() - then for clock, then in zip(clocks, before, strict=True)]
    # A loaded host may give less. More (beyond one late tick), or hardly anything, is our fault.
    for used, share in zip(got, shares, strict=True):
        assert 0.4 * share * elapsed < used < 1.1 * share * elapsed + 0.1, got


def test_children_share_the_limit(start: Start, duty_cycle: DutyCycle) -> None:
    pid = start(BUSY_CHILD)
    child = eventually(lambda: next(iter(psutil.Process(pid).children()), None))
    duty_cycle.limit("parent", pid, 0.01)
    time.sleep(SCAN)
    eventually(lambda: child.status() == psutil.STATUS_STOPPED)
    duty_cycle.release("parent")
    assert child.status() != psutil.STATUS_STOPPED


def test_release_and_close_resume_processes(start: Start, duty_cycle: DutyCycle) -> None:
    processes = {name: psutil.Process(start(BUSY)) for name in ("released", "closed")}
    for name, process in processes.items():
        duty_cycle.limit(name, process.pid, 0.001)
    eventually(lambda: all(p.status() == psutil.STATUS_STOPPED for p in processes.values()))
    duty_cycle.release("released")
    assert processes["released"].status() != psutil.STATUS_STOPPED
    duty_cycle.close()
    duty_cycle.close()
    assert processes["closed"].status() != psutil.STATUS_STOPPED
    with pytest.raises(RuntimeError, match="closed"):
        duty_cycle.limit("late", processes["closed"].pid, 0.5)


def test_process_that_exits_is_ignored(start: Start, duty_cycle: DutyCycle) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as brief:
        duty_cycle.limit("brief", brief.pid, 0.1)
    duty_cycle.limit("gone", brief.pid, 0.1)
    other = psutil.Process(start(BUSY))
    duty_cycle.limit("other", other.pid, 0.001)
    eventually(lambda: other.status() == psutil.STATUS_STOPPED)


def test_share_must_be_positive(duty_cycle: DutyCycle) -> None:
    with pytest.raises(ValueError, match="CPU share of a is"):
        duty_cycle.limit("a", 1, 0.0)


def test_error_that_ends_the_limits_is_an_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    cycle = DutyCycle()
    cycle.check()
    monkeypatch.setattr(cycle, "_tick", lambda _: 1 / 0)
    cycle.limit("a", start(BUSY), 0.5)
    eventually(lambda: not cycle._thread.is_alive())
    with pytest.raises(HostError, match="the CPU limits of the devices ended: ZeroDivisionError"):
        cycle.check()
