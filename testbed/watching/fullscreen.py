"""Full-screen view of a run with keys, for `testbed up` and `testbed watch` on a terminal."""

from __future__ import annotations

import queue
import threading
import time

from rich.console import Console

from agents import events
from agents.device_actions import to_json
from testbed.errors import TestbedError
from testbed.fidelity.host_load import HostSample, Sampler
from testbed.fidelity.validity import Validity, load
from testbed.host.cpusets import cpu_numbers
from testbed.rundir import commands
from testbed.rundir.directory import RunDirectory
from testbed.rundir.tail import Samples
from testbed.watching import overview
from testbed.watching.live import LiveView
from testbed.watching.overview import Overview
from testbed.watching.screen import Screen
from testbed.watching.selection import COMMAND_KEYS, Command, Quit, press_key
from testbed.watching.terminal import Terminal

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


def view(
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
        if (read := overview.read(self._directory)) is not None:
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
        is_sampled = self._overview.energy or self._overview.segments
        if not self._tally.started or (virtual and not is_sampled):
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
        screen.selection, request = press_key(screen.selection, key, rows, page=page, grouped=grouped)
        if isinstance(request, Quit) and self._watching:
            self.quit = True
        elif isinstance(request, Quit):
            screen.messages.append(
                "Press Ctrl-C to end the run. `testbed up -d` runs without a terminal."
            )
        elif isinstance(request, Command):
            self._command(request)
        elif key in COMMAND_KEYS and screen.selection.selected is None:
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
            commands.send(self._directory, *({"device": name, **action} for name in command.devices))
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
