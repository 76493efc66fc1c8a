from __future__ import annotations

import re
from collections.abc import Callable
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.topology import units


@given(st.integers(1, 10**15))
def test_rates_are_written_and_read_back(bits: int) -> None:
    assert units.rate(units.format_rate(bits)) == bits


@given(st.floats(0, 1e9).filter(lambda seconds: seconds == 0 or seconds > 1e-9))
def test_durations_are_written_and_read_back_exactly(seconds: float) -> None:
    assert units.duration(units.format_duration(seconds)) == seconds


@given(st.integers(1, 10**15))
def test_sizes_are_written_and_read_back(count: int) -> None:
    assert units.size(units.format_size(count)) == count


@given(st.integers(1, 10**6), st.integers(0, 6), st.sampled_from(["s", "min", "h"]))
def test_frequencies_are_written_and_read_back(digits: int, places: int, unit: str) -> None:
    rate = units.frequency(f"{digits / 10**places:.6f}/{unit}")
    assert units.frequency(units.format_frequency(rate)) == rate


@pytest.mark.parametrize("text", ["5mbit", "5Mbit", "5Mbit/s", "5Mbps", "5mbps", "5 Mb/s", "5000kbit"])
def test_rates_are_in_bits(text: str) -> None:
    assert units.rate(text) == 5_000_000


@pytest.mark.parametrize("text", ["5MBps", "5MB/s", "5MB", "5Mbyte/s", "5MBPS"])
def test_rate_that_may_mean_bytes_is_refused_with_both_spellings(text: str) -> None:
    with pytest.raises(ValueError, match="write 40mbit for bytes, 5mbit for bits"):
        units.rate(text)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (units.duration, "80ms", 0.08),
        (units.duration, "1.5h", 5400),
        (units.duration, "500µs", 0.0005),
        (units.duration, "500\u03bcs", 0.0005),
        (units.cpu, "25%", 0.25),
        (units.cpu, 1.5, 1.5),
        (units.size, "512MiB", 536_870_912),
        (units.size, "0.5GB", 500_000_000),
        (units.share, "1%", 0.01),
        (units.share, 0.9, 0.9),
        (units.relative_error, "510%", 5.1),
        (units.relative_error, 0.1, 0.1),
    ],
)
def test_quantities_are_parsed(read: object, text: object, value: float) -> None:
    assert callable(read)
    assert read(text) == value


@pytest.mark.parametrize("read", [units.rate, units.duration, units.size])
@pytest.mark.parametrize("value", [5, 5.0, "5", "-5s", "-5mbit", "5 parsecs", "", "5e3s", None, True])
def test_invalid_quantities_are_refused(read: object, value: object) -> None:
    assert callable(read)
    with pytest.raises(ValueError, match=r"^expected a .* such as"):
        read(value)


SHARE = "expected a share from 0 to 1 such as 0.9, or 90%"


@pytest.mark.parametrize(
    ("read", "told", "values"),
    [
        (units.share, SHARE, [1.01, -0.1, "101%", "0.5", True, nan]),
        (units.share_as_typed, SHARE, ["abc", "nan", "1.5", "-1%"]),
        (units.cpu_as_typed, "expected a positive share of one host core", ["abc", "nan", "0", "-1%"]),
        (
            units.relative_error,
            "expected a relative error of at least 0",
            [-0.1, "-1%", "0.5", True, nan, inf],
        ),
    ],
)
def test_invalid_shares_are_refused(
    read: Callable[[object], float], told: str, values: list[object]
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
            read(value)


def test_share_on_the_command_line_is_a_number_or_a_percentage() -> None:
    assert {units.share_as_typed(value) for value in ("0.02", "2%", 0.02)} == {0.02}
    assert {units.cpu_as_typed(value) for value in ("0.25", "25%", 0.25)} == {0.25}
