"""Programs that are started and waited for; none outlives this process, and errors show their output."""

from __future__ import annotations

import os
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
"""What a program has for its own cleaning up before it is killed."""


class StoppedError(Exception):
    """The caller's `stop` was set, and the program has been ended early."""


def run(
    command: Sequence[str],
    *,
    stop: threading.Event,
    output: IO[bytes] | None = None,
    temporary: Path | None = None,
) -> None:
    """Run `command` to its end; its standard output goes to `output`.

    It runs in a session of its own, so that a Ctrl-C of the terminal reaches only this process, which
    ends it with all its children. One that does not remove its temporary files when it is ended is
    given a folder for them, `temporary`. Raises HostError with its last lines where it fails,
    StoppedError if `stop` was set (by another thread) in the meantime.
    """
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


def end(process: subprocess.Popen[bytes]) -> None:
    """End the session that `process` leads: by SIGTERM, then by SIGKILL. Idempotent."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(log: IO[bytes], count: int = 15) -> str:
    """The last `count` lines of a program's output, indented."""
    log.seek(0)
    lines = log.read().decode(errors="replace").rstrip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-count:])
