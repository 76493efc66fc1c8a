"""Disturbances of a run that no scenario ordered."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from agents.disturbances import Ongoing

WATCHED = """
import sys, time
from agents import disturbances
disturbances.Standstills().watch(lambda since, at: print(at - since, flush=True))
print("watching", flush=True)
time.sleep(60)
"""


def test_disturbance_is_reported_at_its_start_and_end() -> None:
    ongoing = Ongoing()
    assert [*ongoing.update({"a": 3.0})] == [("a", 3.0, False)]
    assert [*ongoing.update({"a": 3.0, "b": 5.0})] == [("b", 5.0, False)]
    assert [*ongoing.update({"b": 5.0})] == [("a", 3.0, True)]
    assert [*ongoing.update({})] == [("b", 5.0, True)]
    assert [*ongoing.update({})] == []


def test_process_detects_that_it_was_stopped_by_a_signal() -> None:
    command = [sys.executable, "-c", WATCHED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watched:
        assert watched.stdout is not None
        try:
            assert watched.stdout.readline() == "watching\n"
            time.sleep(0.6)
            watched.send_signal(signal.SIGSTOP)
            time.sleep(4.0)
            watched.send_signal(signal.SIGCONT)
            assert float(watched.stdout.readline()) > 3.5
        finally:
            watched.kill()
