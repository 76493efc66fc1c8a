"""`testbed watch`: view of a running or finished run, from its directory alone.

It may start and end at any time without the run noticing. It yields the CPU to the run (`nice`).
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

_TICK_SECONDS = 0.1
_STATUS_INTERVAL_SECONDS = 1.0
"""Between two checks whether the run is still alive."""
_READ_BYTES = 4 * 2**20
"""Events read at a time: a long run is read in pieces, so that keys stay responsive."""
_NICE = 10


def watch(directory: RunDirectory, console: Console) -> None:
    """Show the run until the user quits or, without a terminal, until it ends.

    Raises BadInputError, RunFailedError where the directory cannot be read.
    """
    with suppress(OSError):
        os.nice(_NICE)
    known = _begun(directory, console)
    with fullscreen.view(console, known, directory, watching=True) as view:
        _Watch(directory, known, view).run()


def _begun(directory: RunDirectory, console: Console) -> Overview:
    """Overview of the run, as soon as there is one. Raises BadInputError where the run ended before
    that."""
    announced = False
    while (known := overview.read(directory)) is None:
        if directory.controller() is None:
            raise BadInputError(f"{directory.run} never got as far as its first device")
        if not announced:
            console.print(f"{directory.run} is being prepared", markup=False, highlight=False)
            announced = True
        time.sleep(_TICK_SECONDS)
    return known


class _Watch:
    def __init__(self, directory: RunDirectory, known: Overview, view: LiveView) -> None:
        self._directory = directory
        self._virtual, self._dilation = known.virtual, known.dilation
        self._view = view
        self._follower = Follower(directory.events)
        self._newest = 0.0
        self._began: events.RunStarted | None = None

    def run(self) -> None:
        look, over = 0.0, False
        while True:
            now = time.monotonic()
            if now >= look:
                look = now + _STATUS_INTERVAL_SECONDS
                over = self._look()
            records = self._records()
            self._view.refresh(now, self._device_time(over=over))
            self._view.take_keys(0.0 if records else _TICK_SECONDS)
            if self._view.quit or (over and not records and not self._view.stays):
                return

    def _records(self) -> list[events.Record]:
        try:
            records = self._follower.read(_READ_BYTES)
        except ValueError as error:
            raise RunFailedError(str(error)) from error
        for record in records:
            if isinstance(record, events.RunStarted):
                self._began = record
            self._newest = max(self._newest, record.at)
            self._view.record(record)
        return records

    def _device_time(self, *, over: bool) -> float:
        """Device time by this host's wall clock or, of a run that is over, of the last record."""
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
    """How the run ended, and its validity where that is known."""
    outcome, judged = manifest.get("outcome"), manifest.get("validity")
    description = "crashed" if outcome is None else f"ended: {events.ended_by(outcome)}"
    return description, None if judged is None else Validity.from_dict(judged)
