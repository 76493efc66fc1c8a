"""One direction of a shaped link, against times computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from agents.config import AccessLink
from testbed.relay.sockets import SEGMENT, LinkPipe, on_wire

ONE = 8 * 1514 / 1e6
"""Seconds that a full packet takes at 1 Mbit/s: 12.112 ms."""
MBIT = AccessLink(up=1_000_000)


def pipe(link: AccessLink, *draws: float) -> LinkPipe[str]:
    """The random numbers come in turn."""
    drawn = iter(draws)
    return LinkPipe(link, "up", lambda: next(drawn))


def emptied(pipe: LinkPipe[str]) -> list[tuple[str, Any]]:
    """Return items with their times, taken from the pipe whenever it has something due."""
    found = []
    while (due := pipe.next_due()) is not None:
        found += [(item, pytest.approx(due)) for item in pipe.pop_due(due)]
    return found


def test_packet_size_includes_headers() -> None:
    assert [on_wire(size) for size in (0, 1, 1448, 1449, 2896)] == [0, 67, 1514, 1581, 3028]


def test_bucket_passes_at_once_after_a_pause_and_then_the_rate_holds() -> None:
    one = pipe(MBIT)
    for item in "abc":
        one.put(item, SEGMENT, 5.0)
    assert emptied(one) == [("a", 5.0), ("b", 5.0 + ONE), ("c", 5.0 + 2 * ONE)]
    one.put("d", SEGMENT, 5.0 + 2.5 * ONE)  # half of the bucket has filled
    assert emptied(one) == [("d", 5.0 + 3 * ONE)]


def test_model_of_100_kb_takes_its_transfer_time() -> None:
    """At 2 Mbit/s: 70 packets of 12,112 bits, of which the bucket holds one."""
    one = pipe(AccessLink(up=2_000_000))
    assert one.piece == SEGMENT
    sent, now = 0, 0.0
    while sent < 100_000:
        if one.is_full:
            now = one.next_due() or now
            one.pop_due(now)
        else:
            sent += SEGMENT
            one.put("model", SEGMENT, now)
    (*_, (_, last)) = emptied(one)
    assert last == 69 * 12_112 / 2e6  # 0.418 s


def test_fast_link_is_fed_in_pieces_of_2_ms() -> None:
    assert pipe(AccessLink(up=20_000_000)).piece == 3 * SEGMENT  # 5000 bytes
    assert pipe(AccessLink(up=10**10)).piece == pipe(AccessLink()).piece == 65_536


def test_delay_is_added_after_the_transfer_time() -> None:
    one = pipe(AccessLink(up=1_000_000, rtt=0.2))
    one.put("a", SEGMENT, 0.0)
    one.put("b", SEGMENT, 0.0)
    assert one.pop_due(0.05) == []
    assert emptied(one) == [("a", 0.1), ("b", 0.1 + ONE)]


def test_jitter_is_uniform_and_keeps_the_order() -> None:
    one = pipe(AccessLink(rtt=0.2, jitter=0.02), 0.0, 1.0, 0.25)
    for item, at in (("a", 0.0), ("b", 1.0), ("c", 1.005)):
        one.put(item, 1, at)
    # 1.005 + 0.09 would overtake.
    assert emptied(one) == [("a", 0.08), ("b", 1.12), ("c", 1.12)]
    one = pipe(AccessLink(rtt=0.02, jitter=0.02), 0.0)
    one.put("a", 1, 3.0)
    assert emptied(one) == [("a", 3.0)], "a delay is never negative"


def test_sender_blocks_when_200_ms_of_data_are_queued() -> None:
    one = pipe(AccessLink(up=8_000_000))  # 200,000 bytes: 132 packets are 199,848
    for _ in range(132):
        assert not one.is_full
        one.put("a", SEGMENT, 0.0)
    assert not one.is_full
    one.put("a", SEGMENT, 0.0)
    assert one.is_full
    assert len(one.pop_due(0.01)) == 7  # 10,000 bytes, and a bucket of 2,000
    assert not one.is_full


def test_an_unlimited_link_holds_no_more_than_its_window() -> None:
    one = pipe(AccessLink(rtt=20))
    for _ in range(1024):
        assert not one.is_full
        one.put("a", 65_536, 0.0)
    one.pop_due(0.0)
    assert one.is_full
    assert len(one.pop_due(10.0)) == 1024
    assert not one.is_full


def test_new_rate_applies_to_queued_data_and_new_delay_to_later_data() -> None:
    one = pipe(AccessLink(up=1_000_000, rtt=0.2))
    for item in "abc":
        one.put(item, SEGMENT, 0.0)
    one.change(AccessLink(up=2_000_000, rtt=1), ONE / 2)  # b's packet has half of its tokens
    assert emptied(one) == [("a", 0.1), ("b", 0.5 + 0.75 * ONE), ("c", 0.5 + 1.25 * ONE)]


def test_piece_larger_than_the_bucket_passes_at_the_slower_rate() -> None:
    one = pipe(AccessLink(up=24_224_000))  # 4 packets in 2 ms
    one.put("a", one.piece, 0.0)
    one.put("b", one.piece, 0.0)
    one.put("c", SEGMENT, 0.0)
    one.change(MBIT, 0.0)
    assert emptied(one) == [("a", 0.0), ("b", 4 * ONE), ("c", 5 * ONE)]


@pytest.mark.parametrize("lifted", [False, True])
def test_limit_can_be_added_or_removed(lifted: bool) -> None:
    one = pipe(MBIT if lifted else AccessLink())
    one.change(AccessLink() if lifted else MBIT, 1.0)
    for item in "ab":
        one.put(item, SEGMENT, 1.0)
    assert emptied(one) == [("a", 1.0), ("b", 1.0 if lifted else 1.0 + ONE)]


def test_outage_queues_bytes_and_the_bucket_stays_bounded() -> None:
    one = pipe(AccessLink(up=1_000_000, rtt=0.2))
    for item in "ab":
        one.put(item, SEGMENT, 0.0)
    one.cut(0.001)  # a is under way
    one.put("c", SEGMENT, 2.0)
    assert one.next_due() is None
    assert one.pop_due(50.0) == []
    assert one.is_full  # who sends now has to wait
    one.mend(60.0)
    assert not one.is_full
    assert emptied(one) == [("a", 60.0), ("b", 60.1), ("c", 60.1 + ONE)]


def test_end_of_stream_takes_no_time_and_stays_last() -> None:
    one = pipe(MBIT)
    one.put("a", SEGMENT, 0.0)
    one.put("b", SEGMENT, 0.0)
    one.put("end", 0, 0.0)
    assert emptied(one) == [("a", 0.0), ("b", ONE), ("end", ONE)]
