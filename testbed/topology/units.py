"""Quantities with their units (`5mbit`, `80ms`, `512MiB`, `1%`), to numbers and back.

Each reader takes a value of the file. Where that is no such quantity it raises ValueError, whose message
begins with "expected"; a number without unit is refused. Arithmetic is exact until the last step, so
that a reader returns exactly the number that was formatted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction

Units = Mapping[str, Fraction | int]

_QUANTITY = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?) ?([A-Za-zµ%/]+)")
FREQUENCY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?/ ?(s|min|h)")
_MAX_LENGTH = 40  # characters; keeps every quantity far inside the range of a float

_RATES = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
# A small b is a bit, whatever the case of its prefix: `Mbps`, `mbps`, `Mb/s` and `Mbit/s` are one and
# the same (tc would read `mbps` as megabytes). A capital B is a byte to some and a bit to others.
_BIT_RATE = re.compile(r"([kKmMgG]?)(?:[bB]it(?:/s)?|bps|b/s)")
_BYTE_RATE = re.compile(r"([kKmMgG]?)(?:B|[bB]ytes?)(?:ps|PS|/s)?")

_DURATIONS: Units = {"h": 3600, "min": 60, "s": 1, "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}
_BINARY_SIZES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
_SIZES = _BINARY_SIZES | {"GB": 10**9, "MB": 10**6, "kB": 10**3}
_POWERS: Units = {"W": 1, "mW": Fraction(1, 10**3)}


def rate(value: object) -> int:
    """bit/s from `5mbit`, `200kbit`, `1gbit`, `Mbps` or `Mbit/s`; above zero and whole."""
    expected = "expected a rate above zero with its unit such as 5mbit, 200kbit or 1gbit"
    number, unit = _split(value, expected)
    if _BYTE_RATE.fullmatch(unit):
        prefix = unit[0].lower() if unit[0] in "kKmMgG" else ""
        raise ValueError(
            f"expected bits per second: {unit} reads as bytes; write {_plain(number * 8)}{prefix}bit "
            f"if you mean bytes, {_plain(number)}{prefix}bit if you mean bits"
        )
    match = _BIT_RATE.fullmatch(unit)
    if match is None or number <= 0:
        raise ValueError(expected)
    bits = number * _RATES[f"{match[1].lower()}bit"]
    if bits.denominator != 1:
        raise ValueError("expected a whole number of bits per second such as 300bit")
    return bits.numerator


def duration(value: object) -> float:
    """Seconds from `80ms`, `30s`, `2min`, `1h` or `500us`; zero or more."""
    expected = "expected a duration with its unit (us, ms, s, min, h) such as 80ms, 30s or 2min"
    return float(_in_base_unit(value, _DURATIONS, expected))


def size(value: object) -> int:
    """Bytes from `512MiB`, `1GiB` or `500MB`; above zero and whole."""
    expected = "expected a size above zero with its unit (MiB, GiB, MB, GB) such as 512MiB"
    count = _in_base_unit(value, _SIZES, expected)
    if count == 0:
        raise ValueError(expected)
    if count.denominator != 1:
        raise ValueError("expected a whole number of bytes such as 512MiB")
    return count.numerator


def power(value: object) -> float:
    """Watts from `6.4W` or `350mW`; zero or more."""
    expected = "expected a power with its unit (W, mW) such as 6.4W or 350mW"
    return float(_in_base_unit(value, _POWERS, expected))


def share(value: object) -> float:
    """A share from 0 to 1, out of `90%` or of the number 0.9 itself."""
    return _ratio(value, 1, "expected a share from 0 to 1 such as 0.9, or 90%")


def share_as_typed(value: object) -> float:
    """`share`, where the number may be text, as on a command line."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    return share(value)


def relative_error(value: object) -> float:
    """A ratio from 0 on, out of `130%` or of the number 1.3 itself."""
    return _ratio(value, sys.float_info.max, "expected a relative error from 0 on such as 0.1, or 10%")


def _ratio(value: object, most: float, expected: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        ratio = float(value)
    else:
        ratio = float(_in_base_unit(value, {"%": Fraction(1, 100)}, expected))
    if not 0 <= ratio <= most:
        raise ValueError(expected)
    return ratio


def frequency(value: object) -> float:
    """Per second, from `2/min`, `0.5/s` or `3/h`; above zero."""
    match = _match(FREQUENCY, value)
    if match is None or not Fraction(match[1]):
        raise ValueError("expected how often per s, min or h, above zero, such as 2/min, 0.5/s or 3/h")
    return float(Fraction(match[1]) / _DURATIONS[match[2]])


def format_rate(bits: int) -> str:
    """`bits` per second in the largest unit that keeps it whole: 5000000 is `5mbit`."""
    return _largest_whole(Fraction(bits), _RATES)


def format_duration(seconds: float) -> str:
    """`seconds` in the largest unit that keeps it whole: 0.08 is `80ms`, 90 is `90s`."""
    return _largest_whole(Fraction(repr(seconds)), _DURATIONS, otherwise="s")


def format_size(count: int) -> str:
    """`count` bytes in the largest binary unit that keeps it whole: 536870912 is `512MiB`."""
    return _largest_whole(Fraction(count), _BINARY_SIZES)


def format_power(watts: float) -> str:
    """`6.4W`."""
    return f"{_plain(Fraction(repr(watts)))}W"


def format_frequency(per_second: float) -> str:
    """In the first unit that needs few digits: 1/30 is `2/min`; `frequency` reads it back."""
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
    return Fraction(match[1]), match[2].replace("µ", "u")


def _in_base_unit(value: object, units: Units, expected: str) -> Fraction:
    """Zero or more."""
    number, unit = _split(value, expected)
    if unit not in units or number < 0:
        raise ValueError(expected)
    return number * units[unit]


def _largest_whole(value: Fraction, units: Units, otherwise: str = "") -> str:
    """`units` from the largest to the smallest; what is whole in none is written in `otherwise`."""
    for unit, scale in units.items():
        count = value / scale
        if count.denominator == 1 and count:
            return f"{count}{unit}"
    return f"{_plain(value)}{otherwise}"


def _plain(value: Fraction) -> str:
    """All decimal digits, no exponent; `value` has no more digits than a float."""
    return format(Decimal(value.numerator) / Decimal(value.denominator), "f")
