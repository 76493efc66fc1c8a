"""Schedule of background traffic, by hand: packets of a rate, transfers, late loops. A packet has 1,514
bytes, so 12,112 bit/s are one packet per second."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from agents.config import Background, DrawnDuration
from agents.links import background
from agents.links.background import RateSchedule, TransferSchedule, schedule

PACKETS = 12_112.0
"""Bit/s per packet/s."""


def _play(source: RateSchedule | TransferSchedule, until: float) -> list[tuple[float, int]]:
    """Return the times and sizes of all that is sent in time."""
    found = []
    while source.next <= until:
        at = source.next
        found += [(round(at, 6), size) for size in source.take(at)]
    return found


def _rates(*changes: tuple[float, float]) -> Iterator[tuple[float, float]]:
    return iter(changes)


def test_packets_leave_as_soon_as_the_rate_allows_them() -> None:
    """10 packets/s from second 1 on, 20 from 1.25 s on: half a packet is due then."""
    source = RateSchedule(_rates((0, 0), (1, 10 * PACKETS), (1.25, 20 * PACKETS)), 0.0, 1.0, 0.0)
    assert _play(source, 1.38) == [(1.1, 1514), (1.2, 1514), (1.275, 1514), (1.325, 1514), (1.375, 1514)]


def test_fast_traffic_is_sent_every_two_milliseconds() -> None:
    source = RateSchedule(_rates((0, 1000 * PACKETS)), 5.0, 1.0, 5.0)
    sent = _play(source, 5.1)
    assert len(sent) == pytest.approx(50, abs=1)
    assert sum(size for _, size in sent) == pytest.approx(100 * 1514, abs=1.5 * 1514)


def test_no_packet_is_ever_due_without_a_rate() -> None:
    source = RateSchedule(_rates((0, 10 * PACKETS), (1, 0)), 0.0, 1.0, 0.0)
    assert len(_play(source, 100.0)) == 10
    assert source.next == math.inf


def test_slow_rate_waits_for_its_packet() -> None:
    source = RateSchedule(_rates((0, PACKETS / 100)), 0.0, 1.0, 0.0)
    assert [round(at) for at, _ in _play(source, 350.0)] == [100, 200, 300]


def test_traffic_that_is_later_than_50_ms_is_lost() -> None:
    """The loop stands still for 3 s; 52 ms of 1,000 packets/s are made up for."""
    source = RateSchedule(_rates((0, 1000 * PACKETS)), 0.0, 1.0, 0.0)
    source.take(0.0)
    assert source.next == 0.002
    assert source.take(3.0)[0] / 1514 == pytest.approx(52, abs=1)


def test_resumed_run_continues_with_the_present_rate() -> None:
    source = RateSchedule(_rates((0, 1e9), (50, 10 * PACKETS), (150, 0)), 0.0, 1.0, 100.0)
    assert source.take(100.0) == []
    assert [at for at, _ in _play(source, 100.25)] == [100.1, 100.2]


def test_dilation_stretches_times_and_rates() -> None:
    source = RateSchedule(_rates((0, 0), (1, 40 * PACKETS)), 0.0, 4.0, 0.0)
    assert [at for at, _ in _play(source, 4.25)] == [4.1, 4.2]


def test_transfers_begin_at_their_times_unless_these_are_long_past() -> None:
    """At 10 s, the one of 1 s is left out and the one of 9.5 s begins."""
    source = TransferSchedule(iter([(0.5, 11.0), (4.75, 22.4), (6.0, 33.0)]), 0.0, 2.0)
    assert source.next == 1.0
    assert source.take(10.0) == [22]
    assert source.next == 12.0
    assert source.take(12.0) == [33]
    assert source.next == math.inf


def test_schedule_follows_the_generator_of_the_segment() -> None:
    size = DrawnDuration("exponential", {"mean": 1e4})
    flows = Background(0, "up", "flows", {"arrivals": 5.0, "size": size})
    source = schedule(flows, 3, "cell", epoch=0.0, dilation=1.0, now=0.0)
    arrivals = background.transfers(flows, 3, "cell")
    for at, sent in _play(source, 10.0):
        begins, size_bytes = next(arrivals)
        assert (at, sent) == (round(begins, 6), round(size_bytes))
    constant = Background(0, "up", "constant", {"rate": 10 * PACKETS})
    assert len(_play(schedule(constant, 3, "cell", epoch=0.0, dilation=1.0, now=0.0), 1.05)) == 10


def test_repeating_trace_of_one_rate_has_one_change() -> None:
    traced = Background(0, "up", "trace", {"times": [0.0, 1.0], "rates_at": [5.0, 5.0], "period": 2.0})
    assert list(background.rates(traced, 0, "cell")) == [(0.0, 5.0)]
