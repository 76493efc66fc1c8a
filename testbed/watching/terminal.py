"""Full-screen drawing on a terminal, with single keys as input.

Only differences between frames are written, each frame in one piece. At the end of the program, cursor,
modes and previous content of the terminal are restored, except after SIGKILL.
"""

from __future__ import annotations

import atexit
import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Sequence
from itertools import zip_longest
from types import FrameType
from typing import IO, Any, Self

from rich.console import Console
from rich.text import Text

from testbed.host.signals import uninterrupted

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = "\x1b[m\x1b[2J\x1b[H\x1b[?25h\x1b[?1049l"
"""Restores the terminal. The screen is cleared first, because some terminals show old content in new
areas when they are enlarged."""
_BEGIN_FRAME, _END_FRAME = "\x1b[?2026h", "\x1b[?2026l"
"""Begin and end of a frame, which terminals that support them show in one step."""
_REDRAW_INTERVAL_SECONDS = 5.0
"""Seconds after which the whole screen is written again, because another program may have written to the
terminal."""
_KEYS = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down",
    "\x1b[H": "home", "\x1bOH": "home", "\x1b[1~": "home",
    "\x1b[F": "end", "\x1bOF": "end", "\x1b[4~": "end",
    "\x1b": "escape", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace",
}  # fmt: skip
_KEY = re.compile(r"\x1b\[[0-9;?]*[@-~]|\x1bO.|.", re.DOTALL)
_KEY_TIMEOUT_SECONDS = 0.03
"""Maximum seconds to wait for the rest of a key sequence that starts with Escape."""


class Terminal:
    """The first `paint` is the first change to the terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._out = console.file.fileno()
        self._in = _own_terminal(sys.stdin)
        self._modes_before: list[Any] | None = None
        self.active = False
        self._suspended = False
        self._stop_before: Any = None
        self._shown: list[Text] = []
        self._size = os.terminal_size((0, 0))
        self._redraw_at = 0.0

    @classmethod
    def for_console(cls, console: Console) -> Self | None:
        """None if the screen cannot be drawn: `console` does not write to a terminal on standard output,
        the terminal does not support drawing, or the program runs in the background of a shell."""
        if not console.is_terminal or console.is_dumb_terminal or console.file is not sys.stdout:
            return None
        return None if _own_terminal(console.file) is None else cls(console)

    @property
    def size(self) -> os.terminal_size:
        size = os.get_terminal_size(self._out)
        return size if size.columns and size.lines else os.terminal_size((80, 24))

    def paint(self, lines: Sequence[Text]) -> None:
        """Each line must be at least one column shorter than the screen."""
        if not _in_foreground(self._out):
            return
        self._start()
        size, now = self.size, time.monotonic()
        shown = self._shown
        if size != self._size or now >= self._redraw_at:
            shown, self._redraw_at = [], now + _REDRAW_INTERVAL_SECONDS
        written = "\x1b[2J" if size != self._size else ""
        for number, (line, before) in enumerate(zip_longest(lines[: size.lines], shown), start=1):
            if line is not None and line != before:
                written += f"\x1b[{number};1H{self._ansi(line)}\x1b[m\x1b[K"
        self._shown, self._size = list(lines), size
        if written:
            self._write(_BEGIN_FRAME + written + _END_FRAME)

    def redraw(self) -> None:
        """Make the next `paint` write the whole frame instead of only the differences."""
        self._size = os.terminal_size((0, 0))

    def keys(self, timeout: float = 0.0) -> list[str]:
        """Wait up to `timeout` seconds for a key. Return all, as characters or key names."""
        if self._suspended:
            self._suspend()
        if self._in is None or not self.active:
            time.sleep(timeout)
            return []
        if not select.select([self._in], [], [], timeout)[0]:
            return []
        data = os.read(self._in, 4096)
        if data.endswith(b"\x1b") and select.select([self._in], [], [], _KEY_TIMEOUT_SECONDS)[0]:
            data += os.read(self._in, 4096)
        if not data:  # the terminal was closed
            self._in = None
        sequences = _KEY.findall(data.decode(errors="ignore"))
        return [_KEYS.get(sequence, sequence) for sequence in sequences]

    def leave(self) -> None:
        """Restore the terminal. Further calls have no effect."""
        if not self.active:
            return
        with uninterrupted():
            self.active = False
            self._write(_LEAVE)
            if self._in is not None and self._modes_before is not None:
                termios.tcflush(self._in, termios.TCIFLUSH)  # so that keys do not reach the shell
                termios.tcsetattr(self._in, termios.TCSANOW, self._modes_before)
            if self._stop_before is not None:
                signal.signal(signal.SIGTSTP, self._stop_before)
            atexit.unregister(self.leave)

    def _start(self) -> None:
        if self.active:
            return
        self._console.file.flush()
        atexit.register(self.leave)
        self.active = True  # from here on, the terminal must be restored
        if threading.current_thread() is threading.main_thread():
            self._stop_before = signal.signal(signal.SIGTSTP, self._note_stop)
        if self._in is not None:
            self._modes_before = termios.tcgetattr(self._in)
            tty.setcbreak(self._in, termios.TCSANOW)
            modes = termios.tcgetattr(self._in)
            modes[tty.IFLAG] &= ~termios.IXON  # Ctrl-S must not stop the program's output
            termios.tcsetattr(self._in, termios.TCSANOW, modes)
        self._write(_ENTER)
        self.redraw()

    def _note_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._suspended = True

    def _suspend(self) -> None:
        """Ctrl-Z: restore the terminal and stop. After the program continues, the next frame is drawn
        again."""
        self._suspended = False
        self.leave()
        os.kill(os.getpid(), signal.SIGTSTP)

    def _ansi(self, line: Text) -> str:
        with self._console.capture() as capture:
            self._console.print(line, end="", soft_wrap=True)
        return capture.get()

    def _write(self, text: str) -> None:
        data = text.encode(self._console.encoding, errors="replace")
        while data:
            data = data[os.write(self._out, data) :]


def _own_terminal(file: IO[str] | None) -> int | None:
    """Descriptor of `file` if it is a terminal that this program may use."""
    try:
        fd = file.fileno() if file else -1
        return fd if os.isatty(fd) and _in_foreground(fd) else None
    except (OSError, ValueError):
        return None


def _in_foreground(fd: int) -> bool:
    """Only in the foreground may the program change the terminal's modes."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # not the terminal of this session, so there is no foreground to check
        return os.isatty(fd)
