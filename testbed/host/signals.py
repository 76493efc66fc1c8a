"""Signal handling. SIGTERM and SIGHUP end a run like Ctrl-C, and cleanup is not interrupted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

Handler = Callable[[int, FrameType | None], None] | signal.Handlers
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupting() -> Iterator[Callable[[], bool]]:
    """Raise KeyboardInterrupt on SIGINT, SIGTERM and SIGHUP; yield a function that returns whether a
    signal was received."""
    received: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    with _handlers(interrupt, _not_ignored()):
        yield lambda: bool(received)


def interrupt_once() -> None:
    """For a process that ends on its first signal: raise KeyboardInterrupt on SIGINT, SIGTERM or SIGHUP,
    and ignore further ones, so that nothing cuts short what the process does at its exit."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        ignore()
        raise KeyboardInterrupt

    for number in _not_ignored():
        signal.signal(number, interrupt)


def ignore() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP from now on."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore SIGINT (Ctrl-C), SIGTERM and SIGHUP."""
    with _handlers(signal.SIG_IGN, _ENDING):
        yield


@contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Only record the first SIGINT, SIGTERM or SIGHUP; yield a function that returns whether it was
    received. A second one raises KeyboardInterrupt: the block may hang."""
    received: list[int] = []

    def record(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    with _handlers(record, _not_ignored()):
        yield lambda: bool(received)


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
