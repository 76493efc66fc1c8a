"""Thread that notices work that does not end, such as an endless loop in a user's rule."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from agents import user_code

PATIENCE_SECONDS = 5.0
"""Seconds after which work that has not ended is reported."""
_LOOK_SECONDS = 1.0


class Watchdog:
    """Watches the thread that makes it. `report` gets a sentence, with the place in the code, once for
    each piece of work that lasts longer than `patience` seconds; `give_up` gets it if the work then
    lasts `longest()` seconds. `own_code_only`: ignore work outside of user code."""

    def __init__(
        self,
        report: Callable[[str], object],
        give_up: Callable[[str], object] = lambda _: None,
        longest: Callable[[], float] = lambda: float("inf"),
        *,
        patience: float = PATIENCE_SECONDS,
        own_code_only: bool = False,
    ) -> None:
        self._patience, self._own_code_only = patience, own_code_only
        self._report, self._give_up, self._longest = report, give_up, longest
        self._watched = threading.get_ident()
        self._since: float | None = None
        """Monotonic time at which the present work began; None between two."""
        self._told: float | None = None
        """`_since` of the work that was reported last."""
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def begin(self) -> None:
        """Record that work begins."""
        self._since = time.monotonic()

    def end(self) -> None:
        """Record that the work has ended."""
        self._since = None

    def close(self) -> None:
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            if (since := self._since) is None:
                continue
            if (lasted := time.monotonic() - since) < self._patience:
                continue
            frame = sys._current_frames().get(self._watched)
            if self._own_code_only and _own_frame(frame) is None:
                continue
            sentence = f"{_place(frame)} for {lasted:.0f} s"
            if since != self._told:
                self._told = since
                self._report(sentence)
            if lasted >= self._longest():
                self._give_up(sentence)


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """Innermost frame in user code."""
    while frame is not None and not user_code.is_own_frame(frame):
        frame = frame.f_back
    return frame


def _place(frame: FrameType | None) -> str:
    """Text such as `own code has not returned from mine.py, line 12 (update),`."""
    own = _own_frame(frame)
    shown = own or frame
    who = "it" if own is None else "own code"
    if shown is None:
        return f"{who} has not returned"
    name = Path(shown.f_code.co_filename).name
    return f"{who} has not returned from {name}, line {shown.f_lineno} ({shown.f_code.co_name}),"
