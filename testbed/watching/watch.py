"""`testbed watch`: view of a running or finished run, from its directory.

The view may start and end at any time without effect on the run, and has a lower CPU priority (`nice`).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

from rich.console import Console

from agents import events
from agents.texts import make_printable
from testbed.errors import BadInputError, reading_run
from testbed.fidelity.validity import Validity
from testbed.rundir.directory import RunDirectory
from testbed.rundir.tail import RecordFollower
from testbed.watching import fullscreen, overview
from testbed.watching.overview import Overview

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
    with fullscreen.view(console, known, directory, watching=True) as view:
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
    while (known := overview.read(directory)) is None:
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
