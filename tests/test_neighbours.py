"""A test that measures says who used the host, and fails where nobody did."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests import neighbours
from tests.waiting import eventually

SPIN = "while True: pass"


def test_busy_loop_of_somebody_else_is_named() -> None:
    before = neighbours.use()
    strangers = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    with subprocess.Popen([sys.executable, "-c", SPIN], env=strangers) as loop:
        try:
            why = eventually(lambda: neighbours.busy_since(before))
        finally:
            loop.kill()
    assert f"({loop.pid})" in why


def test_work_of_the_tests_is_no_neighbour() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN]) as loop:
        try:
            eventually(lambda: psutil.Process(loop.pid).cpu_times().user > 0)
            assert loop.pid not in {pid for pid, _ in neighbours.use().seconds}
        finally:
            loop.kill()


@pytest.mark.parametrize(("used", "is_busy"), [(0.9, False), (1.1, True)])
def test_limit_of_a_tenth_of_a_core(monkeypatch: pytest.MonkeyPatch, used: float, is_busy: bool) -> None:
    before = neighbours.Use({(1, "old"): 5.0}, at=0.0)
    now = neighbours.Use({(1, "old"): 5.0 + used}, at=10.0)
    monkeypatch.setattr(neighbours, "use", lambda: now)
    why = neighbours.busy_since(before)
    assert (why is not None) == is_busy
    assert why is None or "1.1 CPU seconds in 10.0 s: old (1) 1.1 s" in why
