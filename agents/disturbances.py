"""Unplanned disturbances of a run: a process that stands still, a link that carries nothing, work that
does not end."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TypeVar

from agents import user_code
from agents.disk import files
from agents.texts import make_printable

STANDSTILL_SECONDS = 3.0
"""A process must stand still, or a cause such as a cut interface last, for this long to be reported.
Standstills by an action are not reported."""
UNANSWERED_SECONDS = 8.0
"""Seconds without an acknowledgement after which a connection counts as cut."""
_BEAT_SECONDS = 0.5


def cut(device: str) -> str:
    """The device itself cannot distinguish this from an outage in the scenario."""
    return f"nothing came back to {device} over its network"


class Ongoing:
    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def update(self, found: Mapping[str, float]) -> Iterator[tuple[str, float, bool]]:
        """Reason, start and whether it is over, of each disturbance that is new or over. `found`: start
        times of the present ones, by reason."""
        for reason, since in found.items():
            if reason not in self._since:
                self._since[reason] = since
                yield reason, since, False
        for reason in self._since.keys() - found.keys():
            yield reason, self._since.pop(reason), True


class Standstills:
    """Standstills of this process of at least 3 s: the times between two calls, of which a thread makes
    at least two per second. They are in seconds on the monotonic clock."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._found: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def watch(self, report: Callable[[float, float], object] | None = None) -> None:
        """Start a daemon thread that calls `report` with start and end of each standstill. Without
        `report`, the standstills are kept for `pop`."""
        threading.Thread(target=self._beat, args=(report,), name="standstill", daemon=True).start()

    def pop(self) -> list[tuple[float, float]]:
        """Return start and end of each standstill until now that was not returned before."""
        with self._lock:
            self._look()
            found, self._found = self._found, []
            return found

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._last >= STANDSTILL_SECONDS + _BEAT_SECONDS:
            self._found.append((self._last, now))
        self._last = now

    def _beat(self, report: Callable[[float, float], object] | None) -> None:
        while True:
            time.sleep(_BEAT_SECONDS)
            if report is None:
                with self._lock:
                    self._look()
                continue
            for since, at in self.pop():
                report(since, at)


PATIENCE_SECONDS = 5.0
"""Seconds after which work that has not ended is reported."""
LONGEST_SECONDS, LATE_SECONDS = 300.0, 30.0
"""Seconds after which a run ends whose aggregator is still at the same work, and seconds of device time
after the end that `stop: after` asks for, after which it ends as soon as such work is reported."""
_LOOK_SECONDS = 1.0
_FILE = "hanging"
_MAX_BYTES, _MAX_SENTENCE = 2**22, 300
_LOCKED = "Timeout ("
"""Beginning of each traceback that is written while Python's interpreter lock is held."""
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


class Watchdog:
    """Watchdog of the thread that called `begin` last. `report` is called once for each piece of work
    that lasts longer than `patience()` seconds, with a sentence that has its place in the code, and
    `give_up` when it lasts longer than `longest()` seconds. `over` is called once a second while nothing
    lasts long. `own_code_only`: ignore work outside of user code.

    `locked`: descriptor that gets tracebacks of all threads while work holds Python's interpreter lock,
    as C code may do, so that no thread can report it; None: no traceback is written. `ends`: whether
    there is only one traceback, and the process is killed by SIGPROF when such work has used
    `LONGEST_SECONDS` of CPU time.
    """

    def __init__(
        self,
        report: Callable[[str], object],
        give_up: Callable[[str], object] = lambda _: None,
        longest: Callable[[], float] = lambda: float("inf"),
        *,
        over: Callable[[], object] = lambda: None,
        patience: Callable[[], float] = lambda: PATIENCE_SECONDS,
        own_code_only: bool = False,
        locked: int | None = None,
        ends: bool = False,
    ) -> None:
        self._report, self._give_up, self._longest = report, give_up, longest
        self._over, self._patience = over, patience
        self._own_code_only, self._locked, self._ends = own_code_only, locked, ends
        self._watched = threading.get_ident()
        self._since: float | None = None
        """Time in seconds on the monotonic clock at which the present work began; None between two."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        self._thread.start()
        return self

    def begin(self) -> None:
        """Record that work begins."""
        self._watched, self._since = threading.get_ident(), time.monotonic()

    def end(self) -> None:
        """Record that the work has ended."""
        self._since = None

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        if self._locked is not None:
            faulthandler.cancel_dump_traceback_later()
        if self._ends:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _look(self) -> None:
        work: float | None = None
        lasted, is_told = 0.0, False
        while not self._closed.is_set():
            patience = self._patience()
            if self._locked is not None:
                delay = patience if self._ends else patience / 2
                faulthandler.dump_traceback_later(delay, repeat=not self._ends, file=self._locked)
            if self._ends:  # not by the clock: a process that was stopped must not end
                signal.setitimer(signal.ITIMER_PROF, LONGEST_SECONDS)
            self._closed.wait(_LOOK_SECONDS)
            lasted += _LOOK_SECONDS  # not by the clock, which goes on while this process is stopped
            if self._since is None or self._since != work:
                work, lasted, is_told = self._since, 0.0, False
                self._over()
            elif lasted >= patience and (sentence := self._sentence()) is not None:
                if not is_told:
                    is_told = True
                    self._report(sentence)
                if lasted >= self._longest():
                    self._give_up(f"{sentence} for {lasted:.0f} s")

    def _sentence(self) -> str | None:
        """Return where the work is; None if it is to be ignored."""
        frames = sys._current_frames()
        watched = frames.get(self._watched)
        searched = [watched, *frames.values()] if self._own_code_only else [watched]
        own = next(
            (one for top in searched for one in _outwards(top) if user_code.is_own_frame(one)), None
        )
        shown = own or watched
        if shown is None or (own is None and self._own_code_only):
            return None
        code = shown.f_code
        return _sentence(code.co_filename, shown.f_lineno, code.co_name, is_own=own is not None)


class HangingFile:
    """File in `folder` in which a process writes, for the controller, what hangs in it."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
        self.descriptor = os.open(folder / _FILE, flags, 0o644)

    def write(self, sentence: str) -> None:
        self.clear()  # a traceback, if this thread was late
        with suppress(OSError):  # the disk is full
            os.write(self.descriptor, sentence.encode())

    def clear(self) -> None:
        if os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, 0)


def read_hanging(folder: Path, code: Collection[str]) -> str | None:
    """Return the sentence on what hangs in the process whose `HangingFile` is in `folder`; None if
    nothing hangs. `code`: folder of user code, under each of the names that processes have for it."""
    try:
        text = files.read(folder / _FILE, _MAX_BYTES).decode(errors="replace")
    except OSError:
        return None
    if not text.startswith(_LOCKED):
        return make_printable(text.partition(_LOCKED)[0], _MAX_SENTENCE) or None
    if text.count(_LOCKED) < 2:
        return None  # a process that was stopped writes one traceback when it continues
    for path, line, name in _FRAME.findall(text):
        if path.startswith(tuple(f"{folder}/" for folder in code)):
            return make_printable(_sentence(path, int(line), name, is_own=True), _MAX_SENTENCE)
    return "it has not returned from code that holds Python's interpreter lock"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _sentence(path: str, line: int, function: str, *, is_own: bool) -> str:
    """Return where the work is: `own code has not returned from mine.py, line 12 (update)`."""
    who = "own code" if is_own else "it"
    return f"{who} has not returned from {Path(path).name}, line {line} ({function})"


# Repeated attempts at what fails while a peer is still starting.

T = TypeVar("T")
_TARDY_SECONDS = 5.0


def retry(
    attempt: Callable[[], T], timeout_s: float, late: Callable[[OSError], object] = lambda _: None
) -> T:
    """Repeat until there is no OSError; raise the last one after `timeout_s` seconds. If the attempts
    take unusually long, call `late` once, with the last OSError."""
    begin, is_late = time.monotonic(), False
    while True:
        try:
            return attempt()
        except OSError as error:
            waited = time.monotonic() - begin
            if waited > timeout_s:
                raise
            if waited > _TARDY_SECONDS and not is_late:
                is_late = True
                late(error)
            time.sleep(0.1)
