"""A test that measures says who used the host, and fails where nobody did."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from testbed.host import cpus
from testbed.host.cpus import CpuReading, ProcessTime
from tests import neighbours
from tests.waiting import eventually

SPIN = "while True: pass"


def test_busy_loop_of_somebody_else_is_named() -> None:
    before = cpus.read_cpu_times()
    unset = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    strangers = [
        "setsid",
        "--fork",
        sys.executable,
        "-c",
        f"import os; print(os.getpid(), flush=True)\n{SPIN}",
    ]
    with subprocess.Popen(strangers, env=unset, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        loop = psutil.Process(int(starter.stdout.readline()))
        try:
            eventually(lambda: loop.cpu_times().user > 1)
            why = neighbours.busy_since(before)
        finally:
            loop.kill()
    assert why is not None
    assert f"({loop.pid})" in why


def test_work_of_the_tests_is_no_neighbour() -> None:
    before = cpus.read_cpu_times()
    with subprocess.Popen([sys.executable, "-c", SPIN]) as loop:
        try:
            eventually(lambda: psutil.Process(loop.pid).cpu_times().user > 0)
            why = neighbours.busy_since(before) or ""
        finally:
            loop.kill()
    assert f"({loop.pid})" not in why


@pytest.mark.parametrize(("used", "is_busy"), [(0.9, False), (1.1, True)])
def test_limit_of_a_tenth_of_a_core(used: float, is_busy: bool) -> None:
    before, now = (
        CpuReading({(10**7, 0.0): ProcessTime("old", 1, 5.0 + more)}, at=at)
        for more, at in ((0.0, 0.0), (used, 10.0))
    )
    why = neighbours.busy_since(before, now)
    assert (why is not None) == is_busy
    assert why is None or "1.1 CPU seconds in 10.0 s: old (10000000) 1.1 s" in why
