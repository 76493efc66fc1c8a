"""Facts and figures of a run for a tracker, read from the run directory as it grows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from agents import events
from analysis.tally import Tally
from testbed.rundir.directory import RunDirectory
from testbed.rundir.live_files import RecordFollower
from testbed.topology import yamlfile
from testbed.tracking import Tracker


@dataclass(frozen=True, slots=True)
class Facts:
    run: str
    study: str
    """Name of the topology, by which trackers group runs."""
    began: float
    """Unix time at device time 0, in seconds."""
    parameters: Mapping[str, str | int | float | bool]
    """Resolved topology by dotted names, such as `task.local.lr`, or `devices.pi.cpu` for the group
    `pi`."""
    tags: Mapping[str, str]
    """Rule, task, runtime, number of devices, host and commit."""


def read_facts(directory: RunDirectory, began: float) -> Facts:
    """`began`: Unix time at device time 0, in seconds. Raises BadInputError or KeyError."""
    manifest = directory.read_manifest()
    topology = yamlfile.read(directory.topology).data
    known = {name: manifest.get(name) for name in ("rule", "task", "runtime", "commit", "sweep")}
    known |= {"devices": len(manifest["devices"]), "host": manifest.get("host", {}).get("name")}
    return Facts(
        run=directory.run,
        study=str(topology["name"]),
        began=began,
        parameters=dict(_flatten("", topology)),
        tags={f"testbed.{name}": str(value) for name, value in known.items() if value is not None},
    )


def run_files(directory: RunDirectory, *, model: bool) -> list[Path]:
    found = [directory.manifest, directory.topology, directory.fidelity]
    if model:
        found.append(directory.models / "final.safetensors")
    return [path for path in found if path.is_file()]


def _flatten(name: str, value: Any) -> Iterator[tuple[str, str | int | float | bool]]:
    """Join nested keys by dots. A list of scalars becomes a text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        if all(isinstance(inner, Mapping) and "name" in inner for inner in value):
            for inner in value:
                rest = {key: one for key, one in inner.items() if key != "name"}
                yield from _flatten(f"{name}.{inner['name']}", rest)
        else:
            yield name, str([*value])
    elif value is not None:
        yield name, value


_POINTS = 500
"""Windows with a point after which the width doubles, which limits the points of long runs."""


@dataclass(frozen=True, slots=True)
class Point:
    at: float
    """Device time in seconds."""
    values: Mapping[str, float]


@dataclass(slots=True)
class Points:
    """Converter of records to points. The result depends only on the records, and not on when they are
    added.

    Each evaluation gives a point with `accuracy` and `loss`, and with `perplexity` = exp(loss) if the
    task has one. Each window with updates gives a point with the totals `updates`, `version`, `rejected`
    and `megabytes` of payloads, with `updates_per_second` and the mean `staleness` in versions, and with
    the totals of features (`analysis.part.FeatureTally.totals`).

    A window includes its end. It lasts 1 s of device time at first, and twice as long each time that
    `_POINTS` windows have given a point.
    """

    perplexity: bool = False
    _width: float = 1.0
    """Seconds."""
    _made: int = 0
    _begin: float = 0.0
    """Device time at which the current window begins, in seconds."""
    _tally: Tally = field(default_factory=lambda: Tally({}))
    _updates_before: int = 0
    """Updates before the current window; below, the sum of their staleness in versions."""
    _staleness_before: int = 0

    def add(self, record: events.Record) -> Iterator[Point]:
        """Yield the points that are complete now."""
        if record.at > self._begin + self._width or isinstance(record, events.RunEnded):
            yield from self._window(record.at)
        self._tally.add(record)
        if isinstance(record, events.Evaluated):
            values = {"accuracy": record.accuracy, "loss": record.loss}
            if self.perplexity and record.loss < math.log(1e300):
                values["perplexity"] = math.exp(record.loss)
            yield Point(record.at, {name: value for name, value in values.items() if value == value})

    def _window(self, now: float) -> Iterator[Point]:
        """If the current window has updates, yield its point. Begin the window that contains `now`."""
        tally = self._tally
        if (count := tally.updates - self._updates_before) > 0:
            end = min(now, self._begin + self._width)
            values = {
                "version": float(tally.version),
                "updates": float(tally.updates),
                "updates_per_second": count / ((end - self._begin) or self._width),
                "staleness": (tally.staleness_sum - self._staleness_before) / count,
                "megabytes": tally.bytes / 1e6,
                "rejected": float(tally.rejected),
            }
            for part in tally.parts:
                values |= part.totals()
            yield Point(end, values)
            self._updates_before, self._staleness_before = tally.updates, tally.staleness_sum
            self._made += 1
            if self._made % _POINTS == 0:
                self._width *= 2
        self._begin = max(0, math.ceil(now / self._width) - 1) * self._width


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
                tracker.begin(read_facts(directory, record.wall_clock - record.at))
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
    return tracker.end(outcome, run_files(directory, model=model))
