"""Links that the kernel's netem makes, measured inside a user-mode Linux: most hosts' kernels lack it.

It boots once, on this host's files, and measures what tests/uml/table.py lists (tests/uml/inside.py).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agents.device import link
from agents.wire.messages import CgroupLimits
from tests.conftest import unavailable
from tests.uml import table
from tests.uml.table import WAYS

KERNEL, MODULES = "linux.uml", Path("/usr/lib/uml/modules")
ROOT = Path(__file__).parents[2]
LONGEST = 150.0
"""Seconds; the machine powers off earlier by itself."""
ON_WIRE = 1514 / 1448
"""A whole frame, as tbf counts it, against its TCP payload."""
FOUR_ERRORS = 4.0
"""Standard errors: one sample in 16,000 is off by more."""

Measured = dict[tuple[str, str], Any]

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("uml")
    command = [
        *(KERNEL, "root=/dev/root", "rootfstype=hostfs", "ro", "mem=512M", f"uml_dir={folder}/"),
        *("quiet", "loglevel=0", "con=null", "con0=null,fd:1"),
        *(f"PYTHONPATH={ROOT}", "PYTHONDONTWRITEBYTECODE=1", "OPENBLAS_NUM_THREADS=1"),
        *(f"init={sys.executable}", "--", "-m", "tests.uml.inside"),
    ]
    text = _output(command, _environment(folder))
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"row"')]
    found = {(row["row"], row["case"]): row["got"] for row in rows}
    assert ("took", "change") in found, f"the machine ended early:\n{text[-3000:]}"
    return found


def _environment(folder: Path) -> dict[str, str]:
    """Results inside a machine with its own kernel; skips where it cannot run."""
    for program, package in ((KERNEL, "user-mode-linux"), ("insmod", "kmod"), ("tc", "iproute2")):
        if shutil.which(program) is None:
            unavailable("netem", f"no {program}: apt-get install {package}")
    if not MODULES.is_dir():
        unavailable("netem", f"no {MODULES}: apt-get install user-mode-linux")
    environment = {**os.environ, "TMPDIR": str(folder)}
    if "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        if shutil.which("cc") is None:
            unavailable("netem", "no cc, which this CPU's user-mode Linux needs: apt-get install gcc")
        library = folder / "xstate.so"
        source = ROOT / "tests/uml/xstate.c"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
        environment["LD_PRELOAD"] = str(library)
    return environment


def _output(command: list[str], environment: dict[str, str]) -> str:
    """Return the machine's output until it powers off. Its processes form one group and end with this
    one."""
    machine = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with suppress(PermissionError):  # others on the host would make its timers late
        os.sched_setscheduler(machine.pid, os.SCHED_RR, os.sched_param(1))
    try:
        return machine.communicate(timeout=LONGEST)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(machine.pid, signal.SIGKILL)
        machine.communicate()


@pytest.mark.parametrize("case", table.LIMITS)
def test_cgroup_v2_limits_are_read_back(measured: Measured, case: str) -> None:
    assert CgroupLimits(**measured["limits", case]) == table.LIMITS[case][1]


@pytest.mark.parametrize(
    "case", [f"{way} {rate}" for pair in table.RATES for way, rate in zip(WAYS, pair, strict=True)]
)
def test_rate_is_met(measured: Measured, case: str) -> None:
    """Payload and headers together, within 6 %."""
    rate = int(case.split()[1])
    assert measured["rate", case] * ON_WIRE == pytest.approx(rate, rel=0.06)


@pytest.mark.parametrize("way", WAYS)
def test_small_model_is_limited_despite_the_bucket(measured: Measured, way: str) -> None:
    """100 kB at 2 Mbit/s are 0.4 s of payload, 0.418 with headers."""
    assert 0.41 < measured["model", way] < 0.47


def test_link_is_met_as_measured_by_a_device(measured: Measured) -> None:
    asked = table.WHOLE
    assert measured["whole", "loss"] == 0
    assert measured["whole", "rtt"] == pytest.approx(asked.rtt, abs=0.002)
    for way in WAYS:
        assert measured["whole", way] == pytest.approx(getattr(asked, way), rel=0.06)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("delay", table.DELAYS)
def test_delay_is_met(measured: Measured, way: str, delay: float) -> None:
    """Delay in one direction, within 1 ms or 2 %."""
    delays = measured["delay", f"{way} {delay}"]
    assert len(delays) == 20
    assert statistics.median(delays) == pytest.approx(delay, rel=0.02, abs=0.001)


@pytest.mark.parametrize("way", WAYS)
def test_jitter_is_uniform(measured: Measured, way: str) -> None:
    """Mean and standard deviation, jitter/√3, within four standard errors; the latter's of n samples of
    a uniform distribution, whose kurtosis is 1.8, is its √(0.8 / 4n)."""
    delays, count = measured["jitter", way], table.JITTER_PACKETS
    delay, jitter = table.JITTER.rtt / 2, table.JITTER.jitter
    spread = jitter / math.sqrt(3)
    assert len(delays) == count
    assert delay - jitter <= min(delays)
    assert statistics.mean(delays) == pytest.approx(delay, abs=FOUR_ERRORS * spread / math.sqrt(count))
    error = spread * math.sqrt(0.8 / (4 * count))
    assert statistics.stdev(delays) == pytest.approx(spread, abs=FOUR_ERRORS * error)
    assert statistics.quantiles(delays, n=100)[97] < delay + jitter + 0.001  # a host may hold up a few


@pytest.mark.parametrize("way", WAYS)
def test_packets_stay_in_order_under_jitter(measured: Measured, way: str) -> None:
    assert measured["order", way] == list(range(200))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", table.LOSSES)
def test_loss_is_met(measured: Measured, way: str, loss: float) -> None:
    """A binomial count within four standard errors; where none is asked, none."""
    lost, count = measured["loss", f"{way} {loss}"], table.LOSS_PACKETS
    error = math.sqrt(count * loss * (1 - loss))
    assert lost == pytest.approx(count * loss, abs=FOUR_ERRORS * error)


@pytest.mark.parametrize("way", WAYS)
def test_change_in_place_lets_no_burst_through(measured: Measured, way: str) -> None:
    """The link changes from 10 to 1 Mbit/s and from 50 to 5 ms per direction under a flood: no 50 ms
    carry more bytes than rate and bucket allow, and packets stay in order."""
    floods = measured["change", way]
    fast, slow = getattr(table.FAST, way), getattr(table.SLOW, way)
    for told in floods:
        times = [at for at, _ in told["arrivals"]]
        numbers = [number for _, number in told["arrivals"]]
        assert numbers == sorted(numbers)
        assert _most(times, 0.0, math.inf) <= _allowed(fast)
        assert _most(times, told["changed"][1], math.inf) <= _allowed(slow)
    # And the last one was a flood throughout: the link was full before the change and afterwards.
    assert table.full(floods[-1], way)


def _allowed(rate: int) -> float:
    """Bytes of 50 ms at `rate`, of a full bucket, and of the packet that began before."""
    return 0.05 * rate / 8 + link.burst(rate) + 1514


def _most(times: list[float], begin: float, end: float) -> int:
    """Bytes that arrived in the fullest 50 ms from `begin` to `end`."""
    inside = [at for at in times if begin <= at < end]
    return 1514 * max(sum(at <= one < at + 0.05 for one in inside) for at in inside)
