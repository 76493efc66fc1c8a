"""Programs that this process runs and waits for, its file descriptors, and its signals: SIGTERM and
SIGHUP end a run like Ctrl-C, and cleanup is not interrupted."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from testbed.errors import HostError

Handler = Callable[[int, FrameType | None], None] | signal.Handlers
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupting(spared: int = 0) -> Iterator[Callable[[], bool]]:
    """Raise KeyboardInterrupt on SIGINT, SIGTERM and SIGHUP; yield a function that returns whether a
    signal was received. `spared`: number of signals that are only recorded; a block that ends by itself
    after the first may hang, so that the second has to interrupt it."""
    received: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > spared:
            raise KeyboardInterrupt

    with _handlers(interrupt, _not_ignored()):
        yield lambda: bool(received)


def interrupt_once() -> None:
    """For a process that ends on its first signal: raise KeyboardInterrupt on SIGINT, SIGTERM or SIGHUP,
    and ignore further ones, so that nothing cuts short what the process does at its exit."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        ignore_signals()
        raise KeyboardInterrupt

    for number in _not_ignored():
        signal.signal(number, interrupt)


def ignore_signals() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP from now on."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore SIGINT (Ctrl-C), SIGTERM and SIGHUP."""
    with _handlers(signal.SIG_IGN, _ENDING):
        yield


def interrupt_at_end_of_input() -> None:
    """Standard input ends when the process at the other end closes the pipe, or when that process ends
    for any reason. This process then receives SIGTERM."""

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="end of input", daemon=True).start()


def _not_ignored() -> list[signal.Signals]:
    """A process that is started with `nohup`, for example, ignores SIGHUP."""
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def _handlers(handler: Handler, numbers: Iterable[signal.Signals]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it receives signals
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():  # None: the handler was not set from Python
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


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
