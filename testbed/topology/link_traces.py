"""Link traces: how an access link changes over time, read from files, as steps of a run.

There are two formats.

- mahimahi: each line has a time in whole milliseconds at which 1500 bytes can pass in one direction. The
  last line is also the duration of the trace. After this time, the trace repeats without end.
- CSV: a header line with `time` (seconds) and any of `up`, `down` (bit/s), `rtt` (seconds) and `loss`
  (fraction of the packets). Then a row of numbers follows for each change of the link. A row holds until
  the next row. The first row is at time 0. Empty lines and lines that begin with # are skipped.
"""

from __future__ import annotations

import heapq
import io
import itertools
from array import array
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agents import config
from agents.device_actions import SetLink
from agents.disk import files
from agents.timing.nanoseconds import from_seconds
from testbed.topology import timed_csv
from testbed.topology.action_timeline import Step
from testbed.topology.devices import LinkTrace

PACKET_BYTES = 1500
"""Bytes that one line of a mahimahi trace lets through."""
STEP_S = 0.5
"""Seconds over which the rate of a mahimahi trace is averaged. Shorter steps would cost more CPU time,
because each change of a link takes some milliseconds. Most transfers take longer than one step."""
_OUTAGE = 1_000
"""bit/s in place of 0, which the kernel's shapers do not accept. At this rate one packet takes 12 s."""

_LIMITS = {
    "time": (1e9, "seconds"),
    "up": (1e12, "bit/s"),
    "down": (1e12, "bit/s"),
    "rtt": (7200, "seconds"),
    "loss": (1, "a fraction"),
}
"""Maximum value and unit of each column."""
_EXPECTED = "expected time and any of up, down, rtt and loss"
_MAX_DIGITS = 12  # of a time in milliseconds
_MAX_BYTES = 64 * 2**20
"""This is enough for hours at hundreds of Mbit/s in mahimahi's format."""


@dataclass(frozen=True, slots=True)
class LinkSeries:
    """Each value holds from its time to the next time."""

    times: array[float]
    """Seconds, in increasing order; the first is 0."""
    columns: Mapping[str, array[float]]
    """Values at each of `times`, by name in `_LIMITS`. A rate of 0 is an outage, during which nothing
    passes."""
    period: float | None
    """Seconds after which the trace repeats. Without repetition, the last values hold for ever."""

    def changes(self) -> Iterator[tuple[float, dict[str, float]]]:
        """Yield the time in seconds and all values from that time on. The first time is 0.

        The iterator is endless if the trace repeats.
        """
        rows = range(len(self.times))
        last: dict[str, float] = {}
        for number in itertools.count():
            for index in rows:
                values = {name: column[index] for name, column in self.columns.items()}
                if values != last:
                    yield number * (self.period or 0.0) + self.times[index], values
                last = values
            if self.period is None:
                return


def read(trace: LinkTrace, folder: Path) -> list[LinkSeries]:
    """Paths are relative to `folder`. Raises OSError, and ValueError that names the file."""
    found = []
    for key in ("up", "down", "csv"):
        if (name := getattr(trace, key)) is None:
            continue
        path = folder / name
        data = files.read(path, _MAX_BYTES)
        try:
            lines = io.StringIO(data.decode("utf-8-sig"), newline=None)
            if key == "csv":
                found.append(read_csv(lines, loop=trace.loop))
            else:
                found.append(read_mahimahi(lines, key))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return found


def read_mahimahi(lines: Iterable[str], direction: str, step_s: float = STEP_S) -> LinkSeries:
    """`direction`: `up` or `down`. The trace is divided into a whole number of equal steps of about
    `step_s` seconds. The rate of a step is the number of lines with a time in the step, times 1500
    bytes, divided by the length of a step. Raises ValueError with the line number."""
    times_ms = array("q", _milliseconds(lines))
    if not times_ms or times_ms[-1] == 0:
        raise ValueError(
            f"line {max(1, len(times_ms))}: the trace ends at 0 ms, expected its last time to be above 0"
        )
    period_ms = times_ms[-1]
    steps = max(1, round(period_ms / (1000 * step_s)))
    length = period_ms / steps / 1000

    def step_of(time_ms: int) -> int:
        """A time at the end of a step belongs to that step, because the last line of the trace is at the
        end of the last step."""
        return max(0, -(-time_ms * steps // period_ms) - 1)

    times, rates = array("d"), array("d")
    next_step = 0
    for number, group in itertools.groupby(times_ms, step_of):
        if number > next_step:
            times.append(next_step * length)
            rates.append(0)
        times.append(number * length)
        rates.append(_whole_rate(8 * PACKET_BYTES * sum(1 for _ in group) / length))
        next_step = number + 1
    return _trace(times, {direction: rates}, period_ms / 1000)


def read_csv(lines: Iterable[str], *, loop: bool = False) -> LinkSeries:
    """If `loop` is true, the trace repeats, and its last row holds as long as the row before it. Raises
    ValueError with the line number."""
    table = timed_csv.read(lines, _LIMITS, _checked_header)
    columns = dict(table.columns)
    for name in columns.keys() & {"up", "down"}:
        columns[name] = array("d", map(_whole_rate, columns[name]))
    return _trace(table.times, columns, table.period(loop=loop))


def merge(traces: Sequence[LinkSeries]) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield the merged `changes`, such as of both directions. If several traces have the same column,
    the first of these traces counts."""
    changes = [zip(itertools.repeat(number), trace.changes()) for number, trace in enumerate(traces)]
    current: list[dict[str, float]] = [{} for _ in traces]
    for time, group in itertools.groupby(heapq.merge(*changes, key=_time), _time):
        for number, (_, values) in group:
            current[number] = values
        now = ChainMap(*current)
        yield time, {name: now[name] for name in _LIMITS if name in now}


def _time(numbered_change: tuple[int, tuple[float, dict[str, float]]]) -> float:
    return numbered_change[1][0]


def link_at_start(link: config.AccessLink, traces: Sequence[LinkSeries]) -> config.AccessLink:
    """Take the traces' values at time 0. An outage at time 0 is ignored."""
    if not traces:
        return link
    _, values = next(merge(traces))
    # With an outage from the start, the client could not become ready.
    return link.with_changes(
        {name: value for name, value in _link_changes(values).items() if value != _OUTAGE}
    )


def has_loss(traces: Iterable[LinkSeries]) -> bool:
    return any(any(one.columns.get("loss", ())) for one in traces)


def steps(device: str, traces: Sequence[LinkSeries]) -> Iterator[Step]:
    """In the order of time; endless if a trace repeats."""
    for at, values in merge(traces):
        yield Step(from_seconds(at), device, SetLink(_link_changes(values)))


def _link_changes(values: Mapping[str, float]) -> dict[str, float | None]:
    return {
        name: max(int(value), _OUTAGE) if name in ("up", "down") else value
        for name, value in values.items()
    }


def _milliseconds(lines: Iterable[str]) -> Iterator[int]:
    last = 0
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
            raise ValueError(
                f"line {number}: found {text!r:.40}, expected a whole number of milliseconds"
            )
        time_ms = int(text)
        if time_ms < last:
            raise ValueError(
                f"line {number}: found {time_ms} ms, expected at least {last} ms, the time before it"
            )
        last = time_ms
        yield time_ms


def _checked_header(header: list[str]) -> list[str]:
    for name in header:
        if name not in _LIMITS:
            raise ValueError(f"found the column {name!r:.40}, {_EXPECTED}")
        if header.count(name) > 1:
            raise ValueError(f"found the column {name} twice, {_EXPECTED}")
    if "time" not in header or len(header) < 2:
        raise ValueError(f"found only the column {', '.join(header)}, {_EXPECTED}")
    return header


def _whole_rate(rate: float) -> int:
    """A rate above 0 stays above 0, because 0 is an outage."""
    return max(1, round(rate)) if rate else 0


def _trace(times: array[float], columns: Mapping[str, array[float]], period: float | None) -> LinkSeries:
    """`period`: seconds; None for no repetition. A trace whose values never change does not repeat."""
    changes = any(len(set(column)) > 1 for column in columns.values())
    return LinkSeries(times, columns, period if changes else None)
