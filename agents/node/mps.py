"""NVIDIA's MPS for the devices of a run that share GPUs: runs its control daemon, reports when that
answers, and forwards its logs.

    python -m agents.node.mps FOLDER

FOLDER contains the daemon's pipes and is shared with the devices. A CUDA program that cannot reach the
daemon silently runs without limits, so no device is started before the daemon answers. It runs as the
user of the devices' clients, because MPS serves one user at a time, and needs no privileges.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
READY = "ready"
"""Created in the folder when the daemon answers."""
LOGS = "/tmp"  # noqa: S108  # in the daemon's own container
_LOGS = ("control.log", "server.log")
_QUESTION = "get_default_active_thread_percentage"
_ASK_EVERY, _LOOK_EVERY = 0.1, 1.0
"""Seconds between two requests to the daemon, and seconds between two checks of its logs."""
_ANSWER_TIMEOUT_SECONDS = 5.0


def environment(folder: str) -> dict[str, str]:
    """Return the environment variables of both daemon and clients."""
    return {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": LOGS}


def limit_variables(share: float, memory: int | None, gpus: int) -> dict[str, str]:
    """Environment that limits a client to `share` of a GPU's multiprocessors and to `memory` bytes, if
    given. `gpus`: number of the daemon's GPUs. The memory limit is set for each: which number the daemon
    gives to the client's GPU is not known."""
    found = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 * share:g}"}
    if memory is not None:
        pinned = ",".join(f"{number}={memory >> 20}M" for number in range(gpus))
        found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = pinned
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    variables = {**os.environ, **environment(str(folder))}
    sys.exit(run(folder, variables, Path(LOGS), sys.stdout.write))


def run(folder: Path, variables: Mapping[str, str], logs: Path, write: Callable[[str], object]) -> int:
    """Run the daemon until it ends or SIGTERM arrives; return its exit code."""
    try:
        daemon = subprocess.Popen([CONTROL, "-f"], env=variables, stdin=subprocess.DEVNULL)
    except OSError as error:
        write(
            f"mps: {CONTROL} is not in this container ({error}): the container toolkit mounts it from "
            "the host, where it is a part of NVIDIA's driver\n"
        )
        return 1
    signal.signal(signal.SIGTERM, lambda *_: daemon.terminate())
    seen = dict.fromkeys(_LOGS, 0)
    while daemon.poll() is None and not _answers(variables):
        time.sleep(_ASK_EVERY)
    if daemon.poll() is None:
        (folder / READY).touch()
    while daemon.poll() is None:
        _pass_on(logs, seen, write)
        try:
            daemon.wait(_LOOK_EVERY)
        except subprocess.TimeoutExpired:
            continue
    _pass_on(logs, seen, write)
    return daemon.returncode if daemon.returncode >= 0 else 128 - daemon.returncode


def _answers(variables: Mapping[str, str]) -> bool:
    try:
        asked = subprocess.run(
            [CONTROL],
            input=f"{_QUESTION}\n",
            env=variables,
            capture_output=True,
            text=True,
            timeout=_ANSWER_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    try:
        return asked.returncode == 0 and float(asked.stdout.strip()) > 0
    except ValueError:
        return False


def _pass_on(logs: Path, seen: dict[str, int], write: Callable[[str], object]) -> None:
    """New lines of the daemon's and the server's log."""
    for name in _LOGS:
        try:
            with (logs / name).open("rb") as file:
                file.seek(seen[name])
                new = file.read()
        except OSError:
            continue
        seen[name] += len(new)
        if new:
            write(new.decode(errors="replace"))


if __name__ == "__main__":
    main()
