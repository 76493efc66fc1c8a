from __future__ import annotations

import os
import resource
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from testbed.errors import HostError
from testbed.host import processes
from testbed.runtimes.process.log_writer import LogWriter

_LIMITED = """
import resource, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
from testbed.host import processes
processes.raise_limit(int(sys.argv[2]), "devices")
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def _allowed(hard: int, count: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _LIMITED, str(hard), str(count)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_log_files_use_descriptors_above_the_select_limit(tmp_path: Path) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes.raise_limit(1100, "logs")
    writer = LogWriter()
    with ExitStack() as held:
        held.callback(writer.close)
        for number in range(1100):
            os.close(writer.pipe(tmp_path / f"{number}.log"))
        new = os.open(tmp_path, os.O_RDONLY)
        held.callback(os.close, new)
        assert new < 1024
    assert soft <= resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_soft_limit_is_raised_as_needed_and_allowed() -> None:
    assert _allowed(4096, 1000).stdout.split() == ["2024", "4096"]
    assert _allowed(1500, 1000).stdout.split() == ["1500", "1500"]


def test_descriptor_stays_if_no_higher_number_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(processes, "_SELECTABLE", 2**30)
    try:
        assert processes.renumber(reading) == reading
    finally:
        os.close(reading)
        os.close(writing)


def test_fleet_must_fit_the_hard_limit() -> None:
    processes.raise_limit(1, "one device")
    with pytest.raises(HostError, match=r"devices need 1,000,000,000,100 .*raise the hard limit"):
        processes.raise_limit(10**12, "devices")
