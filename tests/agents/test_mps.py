"""MPS of a run, around a stand-in for NVIDIA's daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agents.node import mps
from tests.waiting import eventually

DAEMON = """#!/bin/sh
# Keeps running with -f; without, answers what it is asked once the daemon has made its pipe.
if [ "$1" = -f ]; then
    echo "user $(id -u)" >> "$CUDA_MPS_LOG_DIRECTORY/control.log"
    sleep 0.2
    touch "$CUDA_MPS_PIPE_DIRECTORY/control"
    trap 'echo ended >> "$CUDA_MPS_LOG_DIRECTORY/control.log"; exit 0' TERM
    while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/fail" ]; do sleep 0.05; done
    echo failed >> "$CUDA_MPS_LOG_DIRECTORY/server.log"
    exit 7
fi
[ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ] || exit 1
read -r question
[ "$question" = get_default_active_thread_percentage ] && echo 100.0
"""
PROGRAM = """
import os, sys
from pathlib import Path
from agents.node import mps
logs = Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])
sys.exit(mps.run(Path(sys.argv[1]), os.environ, logs, lambda text: print(text, end="", flush=True)))
"""


def started(tmp_path: Path, daemon: str = DAEMON) -> subprocess.Popen[str]:
    (tmp_path / "pipes").mkdir()
    program = tmp_path / mps.CONTROL
    program.write_text(daemon)
    program.chmod(0o755)
    environment = {
        **os.environ,
        **mps.environment(str(tmp_path / "pipes")),
        "CUDA_MPS_LOG_DIRECTORY": str(tmp_path),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "pipes")]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def wait_until_ready(tmp_path: Path) -> None:
    eventually((tmp_path / "pipes" / mps.READY).exists)


def test_mps_is_ready_once_the_daemon_answers_and_exits_with_it(tmp_path: Path) -> None:
    process = started(tmp_path)
    wait_until_ready(tmp_path)
    assert (tmp_path / "pipes" / "control").exists()
    (tmp_path / "pipes" / "fail").touch()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 7
    assert output.splitlines() == [f"user {os.getuid()}", "failed"]


def test_sigterm_ends_the_daemon(tmp_path: Path) -> None:
    process = started(tmp_path)
    wait_until_ready(tmp_path)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert output.splitlines()[-1] == "ended"


def test_daemon_that_exits_at_once_is_never_ready(tmp_path: Path) -> None:
    process = started(
        tmp_path,
        '#!/bin/sh\n[ "$1" = -f ] && echo why >> "$CUDA_MPS_LOG_DIRECTORY/server.log"\nexit 3\n',
    )
    output, _ = process.communicate(timeout=120)
    assert (process.returncode, output) == (3, "why\n")
    assert not (tmp_path / "pipes" / mps.READY).exists()


def test_missing_daemon_is_reported_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    assert mps.run(tmp_path, {"PATH": str(tmp_path)}, tmp_path, said.append) == 1
    assert "nvidia-cuda-mps-control is not in this container" in said[0]


def test_mps_limits_of_a_client() -> None:
    assert mps.limit_variables(0.25, 2 * 2**30, 1) == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2048M",
    }
    assert mps.limit_variables(0.125, None, 3) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12.5"}
    assert mps.limit_variables(1.0, 2**29, 2)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=512M,1=512M"
