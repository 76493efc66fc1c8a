"""Link traces: what an access link was, or shall be, at each moment. Pure; files are opened elsewhere.

Two formats are read.

- mahimahi's: a whole number of milliseconds on each line, at which 1500 bytes can pass in one
  direction. It repeats without end; its last line says how long one pass takes.
- CSV: a header line of `time` and any of `up`, `down` (bit/s), `delay` (seconds, one way) and `loss`
  (fraction of the packets), then a row of numbers for each moment at which the link changes. A row
  holds until the next one. The first is at time 0. Empty lines and lines that begin with # are skipped.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, NamedTuple

PACKET = 1500
"""Bytes of one opportunity in mahimahi's format."""
STEP = 0.5
"""Seconds; to change the link costs some milliseconds of CPU time, and most transfers take longer."""

_LIMITS = {
    "time": (1e9, "seconds"),
    "up": (1e12, "bit/s"),
    "down": (1e12, "bit/s"),
    "delay": (3600, "seconds"),
    "loss": (1, "a fraction"),
}
"""By column of a CSV file: the most that it may hold, and its unit."""
_EXPECTED = "expected time and any of up, down, delay and loss"
_DIGITS = 12
"""The most that a time in milliseconds may have."""


class Conditions(NamedTuple):
    """Of a link; None where the trace does not say. A rate of 0 is an outage: nothing passes."""

    up: int | None = None
    """bit/s."""
    down: int | None = None
    """bit/s."""
    delay: float | None = None
    """Seconds, one way."""
    loss: float | None = None
    """Fraction of the packets."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Piecewise constant: conditions that hold from each time to the next. Made by the readers below."""

    times: array[float]
    """Seconds; the first is 0, each is above the one before."""
    values: Mapping[str, array[float]]
    """By name of a field of `Conditions`, one for each time; two neighbours differ in one at least."""
    period: float | None
    """Seconds after which it begins again; None where the last conditions hold for ever."""

    def at(self, time: float) -> Conditions:
        """The conditions `time` seconds after the beginning. Raises ValueError for a time before it."""
        return self._conditions(self._position(time)[1])

    def changes(self, start: float = 0.0) -> Iterator[tuple[float, Conditions]]:
        """`start` and the conditions then, and from there each time at which they change.

        Ends after the last change; without end where the trace repeats.
        """
        passes, index = self._position(start)
        yield start, self._conditions(index)
        while True:
            index += 1
            if index == len(self.times):
                if self.period is None:
                    return
                passes, index = passes + 1, 0
                if self._conditions(0) == self._conditions(-1):
                    continue
            yield passes * (self.period or 0.0) + self.times[index], self._conditions(index)

    def _position(self, time: float) -> tuple[int, int]:
        """How many passes are over at `time`, and the step of this one."""
        if not time >= 0:
            raise ValueError(f"found time {time}, expected 0 or more")
        passes, within = (0.0, time) if self.period is None else divmod(time, self.period)
        return int(passes), bisect.bisect_right(self.times, within) - 1

    def _conditions(self, index: int) -> Conditions:
        said = {name: column[index] for name, column in self.values.items()}
        up, down = said.get("up"), said.get("down")
        return Conditions(
            None if up is None else int(up),
            None if down is None else int(down),
            said.get("delay"),
            said.get("loss"),
        )


def read_mahimahi(lines: Iterable[str], direction: Literal["up", "down"], step: float = STEP) -> Trace:
    """The rate of one direction, constant over steps of about `step` seconds.

    A pass has a whole number of equal steps, and each lets as many bytes through as its opportunities
    do. Raises ValueError with the number of the line.
    """
    if not step > 0:
        raise ValueError(f"found a step of {step} s, expected more than 0")
    stamps = array("q", _milliseconds(lines))
    if not stamps or stamps[-1] == 0:
        raise ValueError(f"line {max(1, len(stamps))}: the trace ends at 0 ms, expected a later time")
    period = stamps[-1]
    steps = max(1, round(period / (1000 * step)))
    length = period / steps / 1000

    def number_of(stamp: int) -> int:
        """What passes at the end of a step is its own: the last line is at the end of the last one."""
        return max(0, -(-stamp * steps // period) - 1)

    times, rates = array("d"), array("d")
    following = 0
    for number, group in itertools.groupby(stamps, number_of):
        if number > following:
            times.append(following * length)
            rates.append(0)
        times.append(number * length)
        rates.append(_whole(8 * PACKET * sum(1 for _ in group) / length))
        following = number + 1
    return _merged(times, {direction: rates}, period / 1000)


def read_csv(lines: Iterable[str], *, loop: bool = False) -> Trace:
    """The trace of a CSV file.

    With `loop` it repeats; its last row then holds as long as the one before it. Raises ValueError with
    the number of the line.
    """
    rows = (
        (number, [cell.strip() for cell in line.split(",")])
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    )
    number, header = next(rows, (1, [""]))
    _check_header(number, header)
    columns: dict[str, array[float]] = {name: array("d") for name in header}
    times = columns.pop("time")
    for number, cells in rows:
        try:
            row = _row(header, cells, times[-1] if times else None)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        times.append(row["time"])
        for name, column in columns.items():
            column.append(_whole(row[name]) if name in ("up", "down") else row[name])
    if not times:
        raise ValueError(f"line {number}: no row follows, expected at least one, at time 0")
    period = 2 * times[-1] - times[-2] if loop and len(times) > 1 else None
    return _merged(times, columns, period)


def together(traces: Sequence[Trace], start: float = 0.0) -> Iterator[tuple[float, Conditions]]:
    """`changes` of several traces at once, one for each direction say; of two values, the first."""

    def numbered(number: int, trace: Trace) -> Iterator[tuple[float, int, Conditions]]:
        return ((time, number, conditions) for time, conditions in trace.changes(start))

    current = [Conditions() for _ in traces]
    changes = heapq.merge(*itertools.starmap(numbered, enumerate(traces)), key=itemgetter(0))
    for time, group in itertools.groupby(changes, key=itemgetter(0)):
        for _, number, conditions in group:
            current[number] = conditions
        said = (
            [value for value in values if value is not None] for values in zip(*current, strict=True)
        )
        yield time, Conditions(*(values[0] if values else None for values in said))


def _milliseconds(lines: Iterable[str]) -> Iterator[int]:
    last = 0
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
            raise ValueError(
                f"line {number}: found {text!r:.40}, expected a whole number of milliseconds"
            )
        stamp = int(text)
        if stamp < last:
            raise ValueError(f"line {number}: found {stamp} ms, expected at least {last}, as before it")
        last = stamp
        yield stamp


def _check_header(number: int, header: Sequence[str]) -> None:
    for name in header:
        if name not in _LIMITS:
            raise ValueError(f"line {number}: found the column {name!r:.40}, {_EXPECTED}")
        if header.count(name) > 1:
            raise ValueError(f"line {number}: the column {name} is there twice, {_EXPECTED}")
    if "time" not in header or len(header) < 2:
        raise ValueError(f"line {number}: found no column but {', '.join(header)}, {_EXPECTED}")


def _row(header: Sequence[str], cells: Sequence[str], last: float | None) -> dict[str, float]:
    """The values of a row by column. `last` is the time of the row before it."""
    if len(cells) != len(header):
        raise ValueError(f"found {len(cells)} values, expected {len(header)}: {', '.join(header)}")
    row = {name: _number(name, text) for name, text in zip(header, cells, strict=True)}
    time = row["time"]
    if last is None and time != 0:
        raise ValueError(f"time is {time:g}, expected 0 in the first row: it counts from the start")
    if last is not None and time <= last:
        raise ValueError(f"time is {time:g}, expected more than {last:g}, as before it")
    return row


def _number(name: str, text: str) -> float:
    most, unit = _LIMITS[name]
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise ValueError(f"{name} is {text!r:.40}, expected a number from 0 to {most:g} ({unit})")
    return value


def _whole(rate: float) -> int:
    """bit/s; what is slow is no outage."""
    return max(1, round(rate)) if rate else 0


def _merged(times: array[float], columns: Mapping[str, array[float]], period: float | None) -> Trace:
    """A trace without the steps that change nothing; one that never changes has no period."""
    kept = [
        index
        for index in range(len(times))
        if index == 0 or any(column[index] != column[index - 1] for column in columns.values())
    ]

    def only(values: array[float]) -> array[float]:
        return array("d", (values[index] for index in kept))

    values = {name: only(column) for name, column in columns.items()}
    return Trace(only(times), values, period if len(kept) > 1 else None)
