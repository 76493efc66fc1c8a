"""`testbed watch`: a run that goes on, or that is over, from its directory alone.

It may come and go at any time: the run does not know of it. It gives way to the run (`nice`).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

from rich.console import Console

from agents import events
from testbed.errors import BadInputError, RunFailedError
from testbed.fidelity.validity import Validity
from testbed.rundir.directory import RunDirectory
from testbed.rundir.tail import Follower
from testbed.watching import fullscreen, overview
from testbed.watching.live import LiveView
from testbed.watching.overview import Overview

_TICK = 0.1
_LOOK_EVERY = 1.0
"""Seconds between two looks at whether the run still lives."""
_AT_ONCE = 4 * 2**20
"""Bytes of events: what has been of a long run is read in pieces, so that keys are heard."""
_NICE = 10


def watch(directory: RunDirectory, console: Console) -> None:
    """Show the run until the user has enough or, where there is no terminal, until it ends.

    Raises BadInputError, RunFailedError where the directory cannot be read.
    """
    with suppress(OSError):
        os.nice(_NICE)
    told = _begun(directory, console)
    with fullscreen.view(console, told, directory, watching=True) as view:
        _Watch(directory, told, view).run()


def _begun(directory: RunDirectory, console: Console) -> Overview:
    """What is known of the run, once it is. Raises BadInputError where it never will be."""
    said = False
    while (told := overview.read(directory)) is None:
        if directory.controller() is None:
            raise BadInputError(f"{directory.run} never got as far as its first device")
        if not said:
            console.print(f"{directory.run} is being prepared", markup=False, highlight=False)
            said = True
        time.sleep(_TICK)
    return told


class _Watch:
    def __init__(self, directory: RunDirectory, told: Overview, view: LiveView) -> None:
        self._directory = directory
        self._virtual, self._dilation = told.virtual, told.dilation
        self._view = view
        self._follower = Follower(directory.events)
        self._newest = 0.0
        self._began: events.RunStarted | None = None

    def run(self) -> None:
        look, over = 0.0, False
        while True:
            now = time.monotonic()
            if now >= look:
                look = now + _LOOK_EVERY
                over = self._look()
            records = self._records()
            self._view.refresh(now, self._device_time(over=over))
            self._view.take_keys(0.0 if records else _TICK)
            if self._view.quit or (over and not records and not self._view.stays):
                return

    def _records(self) -> list[events.Record]:
        try:
            records = self._follower.read(_AT_ONCE)
        except ValueError as error:
            raise RunFailedError(str(error)) from error
        for record in records:
            if isinstance(record, events.RunStarted):
                self._began = record
            self._newest = max(self._newest, record.at)
            self._view.record(record)
        return records

    def _device_time(self, *, over: bool) -> float:
        """The wall clock tells it, as it is this host's; of a run that is over, the last record does."""
        if over or self._virtual or self._began is None:
            return self._newest
        since = (time.time() - self._began.wall_clock) / self._dilation
        return max(self._newest, self._began.at + since)

    def _look(self) -> bool:
        """Whether the run is over."""
        lives = self._directory.controller() is not None
        if lives:
            self._view.over("")
        else:
            self._view.over(*_outcome(self._directory.read_manifest()))
        return not lives


def _outcome(manifest: dict[str, Any]) -> tuple[str, Validity | None]:
    """How the run ended, and whether it can be believed, where that is known."""
    outcome, judged = manifest.get("outcome"), manifest.get("validity")
    told = "crashed" if outcome is None else f"ended: {events.ended_by(outcome)}"
    return told, None if judged is None else Validity(judged["valid"], tuple(judged["reasons"]))
