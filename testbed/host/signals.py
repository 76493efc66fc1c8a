"""Signal handling: SIGTERM and SIGHUP end a run as Ctrl-C does; cleaning up is not interrupted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@contextmanager
def interrupting() -> Iterator[Callable[[], bool]]:
    """Inside, SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt; yields whether one came, as a
    function."""
    received: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    with _handlers(interrupt, _not_ignored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        yield lambda: bool(received)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP are ignored."""
    with _handlers(signal.SIG_IGN, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]):
        yield


@contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Inside, signals that would interrupt are only recorded; yields whether one came, as a function."""
    received: list[int] = []
    numbers = _not_ignored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with _handlers(lambda number, _frame: received.append(number), numbers):
        yield lambda: bool(received)


def interrupt_at_end_of_input() -> None:
    """From now on the end of standard input is a SIGTERM: who holds its other end has closed it, or has
    died, by whatever means and in whichever of its threads."""

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="end of input", daemon=True).start()


def _not_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """Those of `numbers` that are not ignored from the start, as with `nohup`."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def _handlers(handler: Handler, numbers: Iterable[signal.Signals]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it gets signals
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():  # None: it is no function of Python's
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
