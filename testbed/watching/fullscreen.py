"""Full-screen view of a run with keys, for `testbed up` and `testbed watch` on a terminal."""

from __future__ import annotations

import atexit
import os
import queue
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from types import FrameType
from typing import IO, Any, Self

from rich.console import Console
from rich.text import Text

from agents import events
from agents.device_actions import to_json
from agents.texts import make_printable
from testbed.errors import BadInputError, TestbedError, reading_run
from testbed.fidelity.host_load import HostSample, Sampler
from testbed.fidelity.validity import Validity, load
from testbed.host.cpus import cpu_numbers
from testbed.host.processes import uninterrupted
from testbed.rundir import live_files
from testbed.rundir.directory import RunDirectory
from testbed.rundir.live_files import RecordFollower, Samples
from testbed.watching import rows
from testbed.watching.choices import COMMAND_KEYS, Command, Quit, press_key
from testbed.watching.live import LiveView
from testbed.watching.rows import Overview
from testbed.watching.screen import Screen

# Full-screen drawing on a terminal, with single keys as input.
#
# Only differences between frames are written, each frame in one piece. At the end of the program,
# cursor, modes and previous content of the terminal are restored, except after SIGKILL.

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


_DRAW_INTERVAL_SECONDS = 0.25
_MAX_CPU_SHARE, _MAX_CPU_SHARE_IN_CONTROLLER = 0.05, 0.02
"""Maximum share of a core for drawing, in a process of its own, and in the controller's."""
_SAMPLE_INTERVAL_SECONDS, _JUDGE_INTERVAL_SECONDS = 1.0, 5.0
"""Seconds between two samples of the host, and between two judgements of all samples."""
_TELEMETRY_BYTES_PER_DEVICE = 4096
"""Bytes at the end of the telemetry file that contain the samples of the last seconds."""
_SAMPLE_LEAD_SECONDS = 0.5
"""Maximum seconds by which a sample may be newer than the time shown."""
_MAX_KEPT_MESSAGES = 20
"""Messages that are printed again after the screen is closed."""


def open_view(
    console: Console, run_overview: Overview, directory: RunDirectory, *, watching: bool = False
) -> LiveView:
    """Full-screen if `console` writes to a terminal, else lines. `watching`: another process controls
    the run, which may already have ended."""
    terminal = Terminal.for_console(console)
    if terminal is None:
        return LiveView(console, run_overview)
    return FullScreenView(console, run_overview, directory, terminal, watching=watching)


class FullScreenView(LiveView):
    """Uses the whole terminal from the start of the run clock to the end of the run.

    Lines before and after that remain on the terminal. The last messages of the full screen are printed
    again after it is closed.
    """

    stays = True

    def __init__(
        self,
        console: Console,
        run_overview: Overview,
        directory: RunDirectory,
        terminal: Terminal,
        *,
        watching: bool,
    ) -> None:
        super().__init__(console, run_overview)
        self._directory = directory
        self._terminal = terminal
        self._watching = watching
        self._screen = Screen(
            run_overview,
            self._tally,
            ascii_only=console.options.ascii_only,
            named_colours=console.color_system == "standard",
            quit_help="q quit" if watching else "^C end",
        )
        self._samples: Samples | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._pending = ""
        """The message that the next answer replaces."""
        self._kept: list[str] = []
        """Messages to print again after the screen is closed."""
        self._host: list[HostSample] = []
        self._sampler: Sampler | None = None
        """None if the run's CPUs are unknown or on another host."""
        self._sampled = self._judged = self._due = 0.0
        """Last sample, last judgement, and next frame, on the monotonic clock."""
        self._at = 0.0
        """Device time shown, in seconds."""
        self._started = self._zero = 0.0
        """Start of the run, when it was read, and device time 0, on the monotonic clock."""

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._give_back()

    def keep(self, message: str) -> None:
        super().keep(message)
        self._screen.pinned = " · ".join(filter(None, (self._screen.pinned, message)))

    def record(self, record: events.Record) -> None:
        if isinstance(record, events.RunStarted):
            self._learn()
            self._started = time.monotonic()
            since = time.time() - record.wall_clock + record.at * self._overview.dilation
            self._zero = self._started - since
        super().record(record)

    def refresh(self, now: float) -> None:
        super().refresh(now)
        tally, virtual = self._tally, self._overview.is_virtual
        if not self._watching:
            if not tally.started or tally.ended is not None:
                return
            self._screen.real = now - self._started if virtual else None
        self._at = tally.at
        if tally.started and not virtual and not self._screen.outcome:
            at = (time.monotonic() - self._zero) / self._overview.dilation
            end = self._overview.stop.after  # device time stops there
            self._at = max(tally.at, at if end is None else min(at, end))
        self._draw(now)

    def over(self, outcome: str, validity: Validity | None) -> None:
        if validity is not None or (self._screen.outcome and not outcome):
            self._screen.validity = validity
        self._screen.outcome = outcome

    def take_keys(self, timeout: float) -> None:
        for key in self._terminal.keys(timeout):
            self._press(key)
            self._due = 0.0

    def _learn(self) -> None:
        """Facts that were not in the plan."""
        if (read := rows.read_overview(self._directory)) is not None:
            self._screen.overview = read
            for device in read.devices:  # known once the data are partitioned
                self._tally.devices[device.name].importance = device.importance
            if cpus := read.cpus:  # of this host
                devices = cpu_numbers(cpus["devices"])
                self._sampler = Sampler(devices | cpu_numbers(cpus["infrastructure"]), devices)

    def _draw(self, now: float) -> None:
        if not self._watching:
            self.take_keys(0.0)
        if now < self._due:
            return
        begin = time.thread_time()
        self._read_samples()
        self._look_at_host(time.monotonic())
        while not self._answers.empty():
            if self._screen.messages[-1:] == [self._pending]:
                self._screen.messages.pop()
            self._screen.messages.append(self._answers.get())
        size = self._terminal.size
        self._terminal.paint(self._screen.frame(self._at, size.columns, size.lines))
        share = _MAX_CPU_SHARE if self._watching else _MAX_CPU_SHARE_IN_CONTROLLER
        self._due = now + max(_DRAW_INTERVAL_SECONDS, (time.thread_time() - begin) / share)

    def _read_samples(self) -> None:
        """Samples of the host's clock that are later than the time shown are ignored. In virtual time,
        samples have device times."""
        virtual = self._overview.is_virtual
        if not self._tally.started:
            return
        if self._samples is None:
            size = _TELEMETRY_BYTES_PER_DEVICE * max(16, len(self._overview.devices))
            self._samples = Samples(self._directory.telemetry, size)
        for sample in self._samples.read():
            at = (sample["at"] - self._zero) / self._overview.dilation
            if virtual:
                self._tally.sample(sample["device"], sample["at"], sample)
            elif at <= self._at + _SAMPLE_LEAD_SECONDS:
                self._tally.sample(sample["device"], at, sample)

    def _look_at_host(self, now: float) -> None:
        """Judge whether broker and aggregator keep up. Late timers are not included, because only the
        controller knows them, and only at the end."""
        due = now >= self._sampled + _SAMPLE_INTERVAL_SECONDS
        if self._sampler is None or not due or self._screen.outcome:
            return
        self._sampled = now
        if (sample := self._sampler.sample(now, 0.0)) is not None:
            self._host.append(sample)
        if self._host and now >= self._judged + _JUDGE_INTERVAL_SECONDS:
            self._judged = now
            self._screen.validity = Validity(tuple(load(self._host)))

    def _press(self, key: str) -> None:
        screen, height = self._screen, self._terminal.size.lines
        if key == "\x0c":  # Ctrl-L
            self._terminal.redraw()
            return
        rows, page, grouped = (
            screen.rows(self._at, height),
            screen.page(height),
            screen.is_grouped(height),
        )
        screen.choices, request = press_key(screen.choices, key, rows, page=page, grouped=grouped)
        if isinstance(request, Quit) and self._watching:
            self.quit = True
        elif isinstance(request, Quit):
            screen.messages.append(
                "Press Ctrl-C to end the run. `testbed up -d` runs without a terminal."
            )
        elif isinstance(request, Command):
            self._command(request)
        elif key in COMMAND_KEYS and screen.choices.selected is None:
            screen.messages.append("Select a row first: ↑ or ↓.")

    def _command(self, command: Command) -> None:
        """In a thread: this process may be the controller that has to answer."""
        messages = self._screen.messages
        if self._overview.is_virtual:
            messages.append("In virtual time, only the topology's scenario can change devices.")
            return
        if self._screen.outcome:
            messages.append("The run has ended.")
            return
        self._pending = f"{command} …"
        messages.append(self._pending)
        threading.Thread(target=self._send, args=(command,), daemon=True).start()

    def _send(self, command: Command) -> None:
        try:
            action = to_json(command.action)
            live_files.send_command(
                self._directory, *({"device": name, **action} for name in command.devices)
            )
        except (TestbedError, OSError) as error:
            self._answers.put(f"{command}: {error}")
        else:
            self._answers.put(f"{command}: done")

    def _print(self, message: str) -> None:
        if not self._terminal.active:
            super()._print(message)
            return
        self._screen.messages.append(message.strip())
        self._kept.append(message)
        self._due = 0.0

    def _evaluated(self, evaluation: events.Evaluated) -> None:
        """The header of the screen shows the evaluation."""

    def _finished(self, ended: events.RunEnded) -> None:
        """The summary shows how the run ended."""
        if not self._watching:
            self._give_back()

    def _give_back(self) -> None:
        self._terminal.leave()
        kept, self._kept = self._kept, []
        if self._watching:
            return
        if (left_out := len(kept) - _MAX_KEPT_MESSAGES) > 0:
            super()._print(f"({left_out} earlier messages: see {self._directory.events})")
        for message in kept[-_MAX_KEPT_MESSAGES:]:
            super()._print(message)


# `testbed watch`: view of a running or finished run, from its directory.
#
# The view may start and end at any time without effect on the run, and has a lower CPU priority
# (`nice`).

_TICK_SECONDS = 0.1
_STATUS_INTERVAL_SECONDS = 1.0
"""Seconds between two checks of whether the run has ended."""
_READ_BYTES = 4 * 2**20
"""Maximum per read of events: a long run is read in pieces, so that the view responds to keys in
between."""
_NICE = 10
_MAX_ERROR = 200
"""Characters of the reason why a run failed."""


def watch(directory: RunDirectory, console: Console) -> None:
    """Show the run until the user quits, or without a terminal until it ends. Raises BadInputError, for
    example if the directory cannot be read."""
    with suppress(OSError):
        os.nice(_NICE)
    known = _planned(directory, console)
    follower = RecordFollower(directory.events)
    next_check, over = 0.0, False
    with open_view(console, known, directory, watching=True) as view:
        while not view.quit:
            now = time.monotonic()
            if now >= next_check:
                next_check = now + _STATUS_INTERVAL_SECONDS
                over = directory.controller() is None
                view.over(*_outcome(directory.read_manifest()) if over else ("", None))
            with reading_run(directory.path):
                records = follower.read(_READ_BYTES)
            for record in records:
                view.record(record)
            view.refresh(now)
            view.take_keys(0.0 if records else _TICK_SECONDS)
            if over and not records and not view.stays:
                return


def _planned(directory: RunDirectory, console: Console) -> Overview:
    """Wait for the plan. Raises BadInputError if the run ends before it has one."""
    announced = False
    while (known := rows.read_overview(directory)) is None:
        if directory.controller() is None:
            raise BadInputError(
                f"{directory.run} ended before any device was planned (testbed logs {directory.run})"
            )
        if not announced:
            console.print(f"{directory.run} is being prepared", markup=False, highlight=False)
            announced = True
        time.sleep(_TICK_SECONDS)
    return known


def _outcome(manifest: dict[str, Any]) -> tuple[str, Validity | None]:
    """How the run ended, and its validity; None if it was not judged."""
    outcome, judged = manifest.get("outcome"), manifest.get("validity")
    description = "crashed" if outcome is None else f"ended: {events.end_reason(outcome)}"
    if error := str(manifest.get("error") or ""):
        description += f": {make_printable(error.splitlines()[0], _MAX_ERROR)}"
    return description, None if judged is None else Validity.from_dict(judged)
