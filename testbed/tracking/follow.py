"""Read a run directory as it grows, and send it to a tracker."""

from __future__ import annotations

import time
from itertools import islice

from agents import events
from testbed.rundir.directory import RunDirectory
from testbed.rundir.tail import RecordFollower
from testbed.tracking import Tracker, facts
from testbed.tracking.points import Point, Points

_TICK_SECONDS = 0.5
_READ_BYTES = 4 * 2**20
"""Maximum size of a read of events."""
_AT_ONCE = 500
"""Maximum number of points per call of a tracker."""


def follow(directory: RunDirectory, tracker: Tracker, *, model: bool = False) -> str:
    """Return when the run is over, with a text that says where it is found. Raises any exception of the
    tracker, and ValueError or BadInputError if files cannot be read."""
    follower = RecordFollower(directory.events)
    points: Points | None = None
    while True:
        live = directory.controller() is not None  # before reading, so that no record is missed
        records = follower.read(_READ_BYTES)
        found: list[Point] = []
        for record in records:
            if points is None and isinstance(record, events.RunStarted):
                points = Points(directory.read_manifest().get("perplexity") is True)
                tracker.begin(facts.read(directory, record.wall_clock - record.at))
            if points is not None:
                found += points.add(record)
        rest = iter(found)
        while some := list(islice(rest, _AT_ONCE)):
            tracker.log(some)
        if not records and not live:
            break
        if not records:
            time.sleep(_TICK_SECONDS)
    if points is None:
        return "the run ended before its clock started"
    outcome = str(directory.read_manifest().get("outcome") or "crashed")
    return tracker.end(outcome, facts.files(directory, model=model))
