"""Numbers as users and files write them: quantities with units (`5mbit`, `80ms`, `512MiB`, `1%`),
numbers of surveys and logs, and CSV files with values over time."""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from agents.texts import describe_value

# Conversion of quantities with units (`5mbit`, `80ms`, `512MiB`, `1%`) to numbers and back.
#
# A reader takes a value as it is in the file. If the value is not the expected quantity, or is a number
# without a unit, the reader raises ValueError with a message that begins with "expected". Arithmetic is
# exact until the last step. A reader therefore returns exactly the number that was formatted.

Units = Mapping[str, Fraction | int]

_QUANTITY = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?) ?([A-Za-z\u00b5\u03bc%/]+)")
_MICRO = re.compile("[\u00b5\u03bc]")
"""Both signs for micro: the micro sign, and the Greek letter that keyboards produce."""
FREQUENCY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?/ ?(s|min|h)")
_MAX_LENGTH = 40  # characters, so that every quantity is well within the range of a float

_RATES = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
# A small b is a bit, in whatever case its prefix is: `Mbps`, `mbps`, `Mb/s` and `Mbit/s` are the same
# (tc would read `mbps` as megabytes). A capital B is ambiguous, and refused.
_BIT_RATE = re.compile(r"([kKmMgG]?)(?:[bB]it(?:/s)?|bps|b/s)")
_BYTE_RATE = re.compile(r"([kKmMgG]?)(?:B|[bB]ytes?)(?:ps|PS|/s)?")

_DURATIONS: Units = {"h": 3600, "min": 60, "s": 1, "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}
_BINARY_SIZES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
_SIZES = _BINARY_SIZES | {"GB": 10**9, "MB": 10**6, "kB": 10**3}
_POWERS: Units = {"W": 1, "mW": Fraction(1, 10**3)}
_ENERGIES: Units = {
    "kWh": 3_600_000, "Wh": 3600, "mWh": Fraction(36, 10), "kJ": 1000, "J": 1,
}  # fmt: skip
_PER_MEGABYTE: Units = {"J/MB": 1, "mJ/MB": Fraction(1, 10**3), "J/GB": Fraction(1, 10**3)}


def rate(value: object) -> int:
    """Convert `5mbit`, `200kbit`, `5Mbps` or `5Mbit/s` to bit/s. The result must be whole and above
    zero."""
    expected = "expected a rate above zero with its unit such as 5mbit, 200kbit or 1gbit"
    number, unit = _split(value, expected)
    if _BYTE_RATE.fullmatch(unit):
        prefix = unit[0].lower() if unit[0] in "kKmMgG" else ""
        raise ValueError(
            f"expected bits per second, but {unit} may mean bytes: write "
            f"{_plain(number * 8)}{prefix}bit for bytes, {_plain(number)}{prefix}bit for bits"
        )
    match = _BIT_RATE.fullmatch(unit)
    if match is None or number <= 0:
        raise ValueError(expected)
    bits = number * _RATES[f"{match[1].lower()}bit"]
    if bits.denominator != 1:
        raise ValueError("expected a whole number of bits per second such as 300bit")
    return bits.numerator


def duration(value: object) -> float:
    """Convert `80ms`, `30s`, `2min`, `1h` or `500us` to seconds. Zero is allowed."""
    expected = "expected a duration with its unit (us, ms, s, min, h) such as 80ms, 30s or 2min"
    return float(_in_base_unit(value, _DURATIONS, expected))


def size(value: object) -> int:
    """Convert `512MiB`, `1GiB` or `500MB` to bytes. The result must be whole and above zero."""
    expected = "expected a size above zero with its unit (MiB, GiB, MB, GB) such as 512MiB"
    count = _in_base_unit(value, _SIZES, expected)
    if count == 0:
        raise ValueError(expected)
    if count.denominator != 1:
        raise ValueError("expected a whole number of bytes such as 512MiB")
    return count.numerator


def power(value: object) -> float:
    """Convert `6.4W` or `350mW` to watts. Zero is allowed."""
    expected = "expected a power with its unit (W, mW) such as 6.4W or 350mW"
    return float(_in_base_unit(value, _POWERS, expected))


def energy(value: object) -> float:
    """Convert `18Wh`, `250mWh` or `36kJ` to joules. The result must be above zero."""
    expected = "expected an energy above zero with its unit (Wh, mWh, kWh, J, kJ) such as 18Wh or 36kJ"
    if (joules := _in_base_unit(value, _ENERGIES, expected)) == 0:
        raise ValueError(expected)
    return float(joules)


def energy_per_megabyte(value: object) -> float:
    """Convert `5J/MB` or `80mJ/MB` to joules per MB (10^6 bytes). Zero is allowed."""
    expected = "expected an energy per MB with its unit (J/MB, mJ/MB, J/GB) such as 5J/MB or 80mJ/MB"
    return float(_in_base_unit(value, _PER_MEGABYTE, expected))


def share(value: object) -> float:
    """Read a share from 0 to 1, such as `90%` or the number 0.9."""
    return _ratio(value, 1, "expected a share from 0 to 1 such as 0.9, or 90%")


def cpu(value: object) -> float:
    """Read a number of cores, such as 0.25 or `25%`."""
    return _ratio(value, sys.float_info.max, "expected a positive share of one host core such as 0.25")


def share_as_typed(value: object) -> float:
    """The number may also be a text, as on a command line."""
    return share(_number_as_typed(value))


def cpu_as_typed(value: object) -> float:
    """The number must be above zero, and may also be a text, as on a command line."""
    if (cores := cpu(_number_as_typed(value))) == 0:
        raise ValueError("expected a positive share of one host core such as 0.25")
    return cores


def _number_as_typed(value: object) -> object:
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


def relative_error(value: object) -> float:
    """Read a ratio of at least 0, such as `130%` or the number 1.3."""
    return _ratio(
        value, sys.float_info.max, "expected a relative error of at least 0 such as 0.1, or 10%"
    )


def _ratio(value: object, most: float, expected: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        ratio = float(value)
    else:
        ratio = float(_in_base_unit(value, {"%": Fraction(1, 100)}, expected))
    if not 0 <= ratio <= most:
        raise ValueError(expected)
    return ratio


def frequency(value: object) -> float:
    """Convert `2/min`, `0.5/s` or `3/h` to a number per second, which must be above zero."""
    match = _match(FREQUENCY, value)
    if match is None or not Fraction(match[1]):
        raise ValueError("expected a number above zero per s, min or h such as 2/min, 0.5/s or 3/h")
    return float(Fraction(match[1]) / _DURATIONS[match[2]])


def format_rate(bits: int) -> str:
    """Take the largest unit that gives a whole number: 5000000 is `5mbit`."""
    return _largest_whole(Fraction(bits), _RATES)


def format_duration(seconds: float) -> str:
    """Take the largest unit that gives a whole number: 0.08 is `80ms`, 90 is `90s`."""
    return _largest_whole(Fraction(repr(seconds)), _DURATIONS, otherwise="s")


def gib(count: int) -> str:
    """`1.5 GiB`."""
    return f"{count / 2**30:.1f} GiB"


def format_size(count: int) -> str:
    """Take the largest binary unit that gives a whole number: 536870912 is `512MiB`."""
    return _largest_whole(Fraction(count), _BINARY_SIZES)


def format_power(watts: float) -> str:
    """`6.4W` for example."""
    return f"{_plain(Fraction(repr(watts)))}W"


def format_energy(joules: float) -> str:
    """Take Wh or kJ if that gives a whole number, and else J."""
    return _largest_whole(Fraction(repr(joules)), {"Wh": 3600, "kJ": 1000}, otherwise="J")


def format_energy_per_megabyte(joules: float) -> str:
    """`5J/MB` for example."""
    return f"{_plain(Fraction(repr(joules)))}J/MB"


def format_frequency(per_second: float) -> str:
    """Take the first unit (second, minute, hour) in which at most 12 digits are exact: 1/30 is `2/min`.
    `frequency` converts the text back to the same number."""
    for unit in ("s", "min", "h"):
        text = f"{per_second * float(_DURATIONS[unit]):.12g}/{unit}"
        if "e" not in text and frequency(text) == per_second:
            return text
    return f"{format(Decimal(repr(per_second)), 'f')}/s"


def _match(pattern: re.Pattern[str], value: object) -> re.Match[str] | None:
    short = isinstance(value, str) and len(value) <= _MAX_LENGTH
    return pattern.fullmatch(str(value)) if short else None


def _split(value: object, expected: str) -> tuple[Fraction, str]:
    match = _match(_QUANTITY, value)
    if match is None:
        raise ValueError(expected)
    return Fraction(match[1]), _MICRO.sub("u", match[2])


def _in_base_unit(value: object, units: Units, expected: str) -> Fraction:
    """The base unit's factor in `units` is 1. Raises ValueError(`expected`) if `value` is not a quantity
    of at least 0 in one of `units`."""
    number, unit = _split(value, expected)
    if unit not in units or number < 0:
        raise ValueError(expected)
    return number * units[unit]


def _largest_whole(value: Fraction, units: Units, otherwise: str = "") -> str:
    """Write `value` in the first of `units` that gives a whole number, or else in `otherwise`. `units`
    begins with the largest."""
    for unit, scale in units.items():
        count = value / scale
        if count.denominator == 1 and count:
            return f"{count}{unit}"
    return f"{_plain(value)}{otherwise}"


def _plain(value: Fraction) -> str:
    """Write all digits without an exponent. `value` must not have more digits than a float."""
    return format(Decimal(value.numerator) / Decimal(value.denominator), "f")


_LARGEST = 1e15
"""Sums, products and quotients of some numbers from its inverse up to it are finite."""


def read_number(
    value: object,
    name: str,
    unit: str = "",
    *,
    least: float = 0.0,
    most: float = _LARGEST,
    above: bool = False,
) -> float:
    """`value`: a number, or its text. `above`: whether it must be above `least`. Raises ValueError that
    names `name`, the value, and what was expected."""
    found = math.nan
    if isinstance(value, str) and value.isascii() and "_" not in value:
        with suppress(ValueError):
            found = float(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value) if abs(value) <= _LARGEST else math.inf
    if (least + 1 / _LARGEST if above else least) <= found <= most:
        return found
    expected = f"above {least:g}" if above else f"of at least {least:g}"
    if most < _LARGEST:
        expected = f"from {least:g} to {most:g}"
    told = f"{value!r:.40}" if isinstance(value, str) else describe_value(value)
    raise ValueError(f"{name} is {told}, expected a number {expected}{f' ({unit})' if unit else ''}")


# CSV files with values over time, such as traces of links and of chargers.
#
# A header line has `time` (seconds) and further columns of numbers. A row holds until the next row. The
# first row is at time 0. Empty lines and lines that begin with # are skipped.

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


def read_timed_csv(
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
