"""Programs that this process runs and waits for, and its file descriptors."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from testbed.errors import HostError

_GRACE_SECONDS = 4.0
"""Seconds between SIGTERM and SIGKILL, for a program's own cleanup."""


class StoppedError(Exception):
    """The program was ended early because the caller's `stop` was set."""


def run(
    command: Sequence[str],
    *,
    stop: threading.Event,
    output: IO[bytes] | None = None,
    temporary: Path | None = None,
) -> None:
    """The program runs in its own session, so Ctrl-C reaches only this process. After Ctrl-C, this
    process ends the program and all its children. `stop`: event with which another thread can end the
    program. `output`: file for standard output; None to show the output only in errors. `temporary`:
    folder for the program's temporary files, for a program that leaves them behind when it is killed.
    Raises HostError with the last lines of the program's output if the program fails, and StoppedError
    if `stop` was set."""
    folder = {} if temporary is None else {"TMPDIR": str(temporary)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output or log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **folder},
        )
        try:
            while process.poll() is None:
                if stop.wait(0.05):
                    raise StoppedError
        finally:
            end(process)
        if process.returncode:
            raise HostError(
                f"'{' '.join(command[:4])} ...' failed with exit code {process.returncode}:\n"
                f"{last_lines(log)}"
            )


def end(process: subprocess.Popen[bytes], grace: float | None = None) -> None:
    """End all processes of the session that `process` leads: by SIGTERM, then by SIGKILL. Further calls
    do nothing. `grace`: seconds between the two signals; None for 4 s."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS if grace is None else grace)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(log: IO[bytes], count: int = 15) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").rstrip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-count:])


_SELECTABLE = 1024
"""select(), which paho calls, supports only descriptors below this number."""
_OWN = 100
"""Descriptors that this process needs for itself."""


def raise_limit(count: int, what: str) -> None:
    """Allow `count` descriptors for `what` in addition to the process's own, by the soft limit. Children
    inherit the limit. Raises HostError if the hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + _OWN:
        raise HostError(
            f"{what} need {count + _OWN:,} file descriptors, but this process may have only {hard:,}: "
            "raise the hard limit (ulimit -Hn, or LimitNOFILE of the service)"
        )
    wanted = _SELECTABLE + count
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def renumber(descriptor: int) -> int:
    """Move `descriptor` to a high number, so that low numbers stay free for select(). If no high number
    is free, it is not moved."""
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _SELECTABLE)
    except OSError:
        return descriptor
    os.close(descriptor)
    return moved
