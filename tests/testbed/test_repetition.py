"""When measurements are repeated, by numbers by hand; who uses this host, by real processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from testbed.fidelity import host_load
from testbed.fidelity.host_load import HostSample, OtherWork
from testbed.host import cpus
from testbed.host.cpus import HYPERVISOR, CpuReading, ProcessTime
from tests.waiting import eventually

BUSY, QUIET, UNKNOWN = OtherWork("", True), OtherWork("", False), OtherWork("", None)


@pytest.mark.parametrize(
    ("count", "work", "seconds"),
    [
        (1, [BUSY], 2.0),
        (2, [QUIET, BUSY], 5.0),
        (3, [BUSY], 10.0),
        (4, [BUSY], None),
        (1, [QUIET], None),
        (1, [QUIET, QUIET], None),
        (1, [QUIET, UNKNOWN], 2.0),
    ],
)
def test_pauses_before_three_repetitions_while_a_host_is_busy(
    count: int, work: list[OtherWork], seconds: float | None
) -> None:
    assert host_load.pause(count, work) == seconds


def test_use_of_this_host_in_words() -> None:
    """9, 3.6, 0.5 and 0.1 CPU seconds in 10 s are 0.9, 0.36, 0.05 and 0.01 cores, 1.32 together."""
    used = {"python3 (12)": 9.0, "cc1 (7)": 3.6, HYPERVISOR: 0.5, "top (9)": 0.1}
    told = "others use 1.3 of 2 cores: python3 (12) 0.9, cc1 (7) 0.36, the hypervisor 0.05"
    assert host_load.from_seconds(used, 10.0, 2) == OtherWork(told, True)
    assert host_load.from_seconds({"a (1)": 1.0}, 10.0, 2) == OtherWork(
        "others use 0.1 of 2 cores", False
    )
    assert host_load.from_seconds({}, 10.0, 4) == OtherWork("others use 0 of 4 cores", False)


@pytest.mark.parametrize(
    ("foreign", "steal", "told"),
    [
        (0.4, 0.02, OtherWork("others use 42% of edge-2 (not known who)", True)),
        (0.03, 0.01, OtherWork("others use 4% of edge-2 (not known who)", False)),
        (None, 0.5, OtherWork("the load of edge-2 is not known", None)),
    ],
)
def test_use_of_another_host_in_words(foreign: float | None, steal: float, told: OtherWork) -> None:
    sample = HostSample(
        at=0.0,
        seconds=5.0,
        server_load=None,
        foreign=foreign,
        elsewhere=None,
        device_busy=1.0,
        steal=steal,
        tick_lateness=0.0,
    )
    assert host_load.on_another_host("edge-2", sample) == told
    unknown = OtherWork("the load of edge-2 is not known", None)
    assert host_load.on_another_host("edge-2", None) == unknown


def test_ended_process_counts_for_the_parent_that_inherits_its_cpu_time() -> None:
    """`make` had used 1 s, and its child `cc1` 100 s. The child used 3 s more and ended. Another
    came and ended after 2 s: `make` has 1 + 103 + 2 s, 5 more. A new process with an old id has 4 s."""
    before = CpuReading(
        {
            (5, 1.0): ProcessTime("make", 1, 1.0),
            (6, 2.0): ProcessTime("cc1", 5, 100.0),
            (7, 3.0): ProcessTime("old", 1, 50.0),
            (8, 4.0): ProcessTime("idle", 1, 9.0),
            (9, 4.0): ProcessTime("own", 1, 1.0),
        },
        stolen=10.0,
        at=100.0,
    )
    now = CpuReading(
        {
            (5, 1.0): ProcessTime("make", 1, 106.0),
            (7, 30.0): ProcessTime("new", 1, 4.0),
            (8, 4.0): ProcessTime("idle", 1, 9.0),
            (9, 4.0): ProcessTime("own", 1, 8.0),
        },
        stolen=10.5,
        at=110.0,
    )
    used = cpus.used_between(before, now, lambda pid: pid == 9)
    assert [*used.items()] == [("make (5)", 5.0), ("new (7)", 4.0), (HYPERVISOR, 0.5)]


@pytest.fixture
def stranger() -> Iterator[psutil.Process]:
    """A busy process that is no descendant of this one."""
    loop = "(while :; do :; done) >/dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["sh", "-c", loop], capture_output=True, check=True).stdout)
    try:
        yield psutil.Process(pid)
    finally:
        psutil.Process(pid).kill()


def _has_used(process: psutil.Process, seconds: float) -> bool:
    return bool(process.cpu_times().user > seconds)


def test_processes_of_the_run_are_no_others(stranger: psutil.Process) -> None:
    own = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    before = cpus.read_cpu_times()
    try:
        for process in (psutil.Process(own.pid), stranger):
            eventually(partial(_has_used, process, process.cpu_times().user + 0.1))
    finally:
        own.kill()
        now = cpus.read_cpu_times()
        own.wait()
    is_own = cpus.is_of_run(now, ())
    assert is_own(own.pid)
    assert is_own(os.getpid())
    assert not is_own(stranger.pid)
    everybody = cpus.used_between(before, now)
    assert {f"sh ({own.pid})", f"sh ({stranger.pid})"} <= everybody.keys()
    assert f"sh ({own.pid})" not in cpus.used_between(before, now, is_own)
    name = Path(f"/proc/{stranger.pid}/cgroup").read_text(encoding="utf-8").split()[0]
    assert cpus.is_of_run(now, [name])(stranger.pid)  # as a container of the run
