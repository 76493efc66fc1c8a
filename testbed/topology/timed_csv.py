"""CSV files with values over time, such as traces of links and of chargers.

A header line has `time` (seconds) and further columns of numbers. A row holds until the next row. The
first row is at time 0. Empty lines and lines that begin with # are skipped.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from testbed.topology.numbers import read_number

Limits = Mapping[str, tuple[float, str]]
"""Maximum value and unit of each column. All values are at least 0."""


@dataclass(frozen=True, slots=True)
class TimedTable:
    lines: array[int]
    """Number of each row's line."""
    times: array[float]
    """Seconds, in increasing order; the first is 0."""
    columns: Mapping[str, array[float]]
    """Values at each of `times`."""

    def period(self, *, loop: bool) -> float | None:
        """Seconds after which the rows repeat: if there is more than one, the last holds as long as the
        row before it."""
        return 2 * self.times[-1] - self.times[-2] if loop and len(self.times) > 1 else None


def read(
    lines: Iterable[str],
    limits: Limits,
    header_of: Callable[[list[str]], list[str]],
    empty: str | None = None,
) -> TimedTable:
    """`header_of`: returns the names of the columns for the cells of the header line, or raises
    ValueError. `empty`: what the error about an empty cell says after the name of the column; None if an
    empty cell is an error like any other wrong number. Raises ValueError with the line number."""
    rows = (
        (number, [cell.strip() for cell in line.split(",")])
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    )
    number, cells = next(rows, (1, [""]))
    try:
        header = header_of(cells)
        numbers, columns = array("q"), {name: array("d") for name in header}
        times = columns.pop("time")
        for number, cells in rows:
            if empty is not None and "" in cells and len(cells) == len(header):
                raise ValueError(f"{header[cells.index('')]} {empty}")
            row = _row(header, cells, limits, times[-1] if times else None)
            numbers.append(number)
            times.append(row["time"])
            for name, column in columns.items():
                column.append(row[name])
        if not times:
            raise ValueError("no row follows the header, expected at least one, at time 0")
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None
    return TimedTable(numbers, times, columns)


def _row(
    header: Sequence[str], cells: Sequence[str], limits: Limits, last: float | None
) -> dict[str, float]:
    """`last`: time of the previous row in seconds."""
    if len(cells) != len(header):
        raise ValueError(f"found {len(cells)} values, expected {len(header)}: {', '.join(header)}")
    bounded = ((name, text, *limits[name]) for name, text in zip(header, cells, strict=True))
    row = {name: read_number(text, name, unit, most=most) for name, text, most, unit in bounded}
    time = row["time"]
    if last is None and time != 0:
        raise ValueError(f"time is {time:g} in the first row, expected 0")
    if last is not None and time <= last:
        raise ValueError(
            f"time is {time:g}, expected more than {last:g}, the time before it: sort the rows"
        )
    return row
