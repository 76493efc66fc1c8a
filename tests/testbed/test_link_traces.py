from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.topology import link_traces
from testbed.topology.link_traces import LinkSeries

EXAMPLES = Path(__file__).parents[2] / "topologies" / "traces"
CSV = "time,up,down,rtt,loss\n0,1e6,5000000,0.08,0\n2,0,0,0.2,0.5\n3,2000000,5e6,0.08,0\n"


def _mahimahi(*stamps: int, step: float = link_traces.STEP_S) -> LinkSeries:
    return link_traces.read_mahimahi((f"{stamp}\n" for stamp in stamps), "down", step)


def _csv(text: str, *, loop: bool = False) -> LinkSeries:
    return link_traces.read_csv(text.splitlines(keepends=True), loop=loop)


def _at(trace: LinkSeries, time: float) -> dict[str, float]:
    """The values that hold at `time`."""
    *_, (_, values) = itertools.takewhile(lambda change: change[0] <= time, trace.changes())
    return values


def test_delivery_opportunities_become_a_rate_per_step() -> None:
    """1500 bytes are 12,000 bit: over 0.1 s, 120 kbit/s each."""
    trace = _mahimahi(10, 100, 101, 350, 360, 400, step=0.1)
    assert list(trace.times) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert list(trace.columns["down"]) == [240_000, 120_000, 0, 360_000]
    assert trace.period == 0.4
    assert _at(trace, 0.25) == {"down": 0}
    assert _at(trace, 0.35) == _at(trace, 4.35) == {"down": 360_000}


def test_rate_of_a_step_by_hand() -> None:
    """1.1 s in steps of about 0.5 s are two of 0.55 s. One packet per millisecond are 12 Mbit/s."""
    trace = _mahimahi(550, 551, 1100)
    assert list(trace.times) == pytest.approx([0, 0.55])
    assert list(trace.columns["down"]) == [round(12_000 / 0.55), round(24_000 / 0.55)]
    assert list(_mahimahi(0, 0, 1000, step=0.5).columns["down"]) == [48_000, 24_000]
    for trace in (_mahimahi(1), _mahimahi(*range(1, 2001))):
        assert list(trace.changes()) == [(0, {"down": 12_000_000})]


@given(st.lists(st.integers(1, 20_000), min_size=1), st.sampled_from([0.1, 0.5, 3.0]))
def test_pass_carries_as_many_bytes_as_its_opportunities(stamps: list[int], step: float) -> None:
    trace = _mahimahi(*sorted(stamps), step=step)
    if trace.period is None:  # always the same
        assert _at(trace, 0)["down"] == pytest.approx(12_000 * len(stamps) / (max(stamps) / 1000), abs=1)
        return
    ends = [*trace.times[1:], trace.period]
    spans = [end - begin for begin, end in zip(trace.times, ends, strict=True)]
    bits = sum(rate * span for rate, span in zip(trace.columns["down"], spans, strict=True))
    assert bits == pytest.approx(12_000 * len(stamps), abs=trace.period)  # each rate is rounded


def test_long_outage_takes_no_memory() -> None:
    trace = _mahimahi(100, 100_000_000_000, step=0.1)
    assert list(trace.columns["down"]) == [120_000, 0, 120_000]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the trace ends at 0 ms"),
        ("0\n0\n", "line 2: the trace ends at 0 ms"),
        ("5\n\n6\n", "line 2: found '', expected a whole number of milliseconds"),
        ("5\n6.5\n", "line 2: found '6.5', expected a whole number"),
        ("-5\n", "line 1: found '-5', expected a whole number"),
        ("5\n7\n6\n", "line 3: found 6 ms, expected at least 7"),
        ("9" * 13, "line 1: found '9999999999999', expected a whole number"),
    ],
)
def test_a_malformed_mahimahi_file_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        link_traces.read_mahimahi(text.splitlines(), "up")


def test_csv_row_holds_until_the_next() -> None:
    trace = _csv(CSV)
    first, outage, last = (
        {"up": 1_000_000, "down": 5_000_000, "rtt": 0.08, "loss": 0},
        {"up": 0, "down": 0, "rtt": 0.2, "loss": 0.5},
        {"up": 2_000_000, "down": 5_000_000, "rtt": 0.08, "loss": 0},
    )
    assert list(trace.changes()) == [(0, first), (2, outage), (3, last)]
    assert _at(trace, 1.999) == first
    assert _at(trace, 2) == outage
    assert _at(trace, 1e9) == last


def test_repeating_csv_holds_its_last_row_like_the_one_before() -> None:
    trace = _csv(CSV, loop=True)
    assert trace.period == 4
    times = [time for time, _ in itertools.islice(trace.changes(), 7)]
    assert times == [0, 2, 3, 4, 6, 7, 8]
    assert _at(trace, 4) == _at(trace, 0)
    assert _at(trace, 6.5) == {"up": 0, "down": 0, "rtt": 0.2, "loss": 0.5}


def test_repeat_is_no_change_if_it_starts_as_it_ended() -> None:
    trace = _csv("time,loss\n0,0\n1,0.5\n2,0\n", loop=True)
    assert trace.period == 3
    assert [time for time, _ in itertools.islice(trace.changes(), 5)] == [0, 1, 2, 4, 5]


def test_columns_may_be_in_any_order_and_comments_are_skipped() -> None:
    trace = _csv("# made up\n\n loss , time\r\n0.1, 0\n\n# more\n0.1,1\n0,2\n")
    assert list(trace.changes()) == [(0, {"loss": 0.1}), (2, {"loss": 0})]
    assert _at(_csv("time,up\n0,0.2\n"), 0) == {"up": 1}, "a slow link is no outage"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: found the column '', expected time and any of up, down, rtt and loss"),
        ("time\n0\n", "line 1: found only the column time, expected"),
        ("up\n5\n", "line 1: found only the column up, expected time"),
        ("time,rate\n", "line 1: found the column 'rate', expected"),
        ("time,up,up\n", "line 1: found the column up twice"),
        ("# x\ntime,up\n", "line 2: no row follows"),
        ("time,up\n0,5mbit\n", "line 2: up is '5mbit', expected a number from 0 to 1e+12 (bit/s)"),
        ("time,up\n0,-1\n", "line 2: up is '-1', expected"),
        ("time,up\n0,nan\n", "line 2: up is 'nan', expected"),
        ("time,up\n0,\n", "line 2: up is '', expected"),
        ("time,loss\n0,2\n", "line 2: loss is '2', expected a number from 0 to 1 (a fraction)"),
        ("time,up\n1,5\n", "line 2: time is 1 in the first row, expected 0"),
        ("time,up\n0,5\n\n3,6\n3,7\n", "line 5: time is 3, expected more than 3"),
        ("time,up\n0,5,6\n", "line 2: found 3 values, expected 2: time, up"),
    ],
)
def test_a_malformed_csv_file_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^line") as refused:
        _csv(text)
    assert str(refused.value).startswith(message)


@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(0, 3), st.sampled_from([0.0, 0.25])), min_size=1
    ),
    st.booleans(),
)
def test_written_traces_are_read_back(rows: list[tuple[int, int, float]], loop: bool) -> None:
    times = [0, *itertools.accumulate(gap for gap, _, _ in rows[1:])]
    text = "time,up,loss\n" + "".join(
        f"{time / 1000!r},{up},{loss}\n" for time, (_, up, loss) in zip(times, rows, strict=True)
    )
    trace = _csv(text, loop=loop)
    for time, (_, up, loss) in zip(times, rows, strict=True):
        assert _at(trace, time / 1000) == {"up": up, "loss": loss}
        if trace.period is not None:  # rows are a millisecond apart, or more
            assert _at(trace, trace.period + (time + 0.5) / 1000) == {"up": up, "loss": loss}
    changes = list(itertools.islice(trace.changes(), 20))
    for (begin, before), (end, after) in itertools.pairwise(changes):
        assert begin < end
        assert before != after


def test_traces_of_both_directions_are_followed_together() -> None:
    up = link_traces.read_mahimahi(["500", "1000", "1000"], "up")  # 24 and 48 kbit/s, 0.5 s each
    down = _csv("time,down,up\n0,7,1\n0.75,8,2\n1,9,3\n")
    assert list(itertools.islice(link_traces.merge([up, down]), 5)) == [
        (0, {"up": 24_000, "down": 7}),
        (0.5, {"up": 48_000, "down": 7}),
        (0.75, {"up": 48_000, "down": 8}),
        (1, {"up": 24_000, "down": 9}),
        (1.5, {"up": 48_000, "down": 9}),
    ]


def test_example_traces_match_their_description() -> None:
    with (EXAMPLES / "walk.down").open(encoding="utf-8") as file:
        walk = link_traces.read_mahimahi(file, "down")
    assert walk.period == 10
    assert all(1e6 < rate < 10e6 for rate in walk.columns["down"])
    with (EXAMPLES / "train.csv").open(encoding="utf-8") as file:
        train = link_traces.read_csv(file, loop=True)
    assert train.period == 120
    assert _at(train, 65) == {"up": 0, "down": 0, "rtt": 0.2, "loss": 0}
