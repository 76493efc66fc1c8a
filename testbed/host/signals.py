"""Signal handling: SIGTERM and SIGHUP end a run as Ctrl-C does; cleaning up is not interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@contextmanager
def interrupting() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handlers(dict.fromkeys(_wanted(signal.SIGTERM, signal.SIGHUP), interrupt)):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP are ignored."""
    ignore = signal.SIG_IGN
    with _handlers({signal.SIGINT: ignore, signal.SIGTERM: ignore, signal.SIGHUP: ignore}):
        yield


@contextmanager
def noted() -> Iterator[Callable[[], bool]]:
    """Inside, signals that would interrupt are only recorded; yields whether one came, as a function."""
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    wanted = _wanted(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with _handlers(dict.fromkeys(wanted, note)):
        yield lambda: bool(came)


def _wanted(*numbers: signal.Signals) -> list[signal.Signals]:
    """Those of `numbers` that are not ignored from the start, as `nohup` does."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def _handlers(handlers: dict[signal.Signals, Handler]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it gets signals
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
