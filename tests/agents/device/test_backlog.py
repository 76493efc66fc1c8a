"""Bytes that a link carries while packets are queued, against sums by hand."""

from __future__ import annotations

import pytest

from agents.device.link_measurement import Backlog
from agents.wire.messages import QueueUse

RATE = 8_000_000
"""bit/s: 1,000,000 bytes a second."""


def test_only_intervals_with_a_queue_throughout_are_counted() -> None:
    """In the first eighth of a second after a departure fewer bytes leave than were queued; in the
    second more, so the queue may have been empty; in the third the queue is empty at its beginning."""
    one = Backlog()
    one.read(-0.125, 0, 150_000, RATE)
    for at, left, waiting in ((0.0, 5_000, 150_000), (0.125, 95_000, 60_000), (0.25, 195_000, 0)):
        one.read(at, left, waiting, RATE)
    one.read(0.375, 195_000, 0, RATE)
    assert one.use == QueueUse(0.125, 90_000, 125_000)


def test_bytes_in_socket_buffers_count_while_the_queue_is_not_empty() -> None:
    """They count while the queue is not empty at a sample; otherwise TCP waits for the other side."""
    one = Backlog()
    one.read(-0.125, -1_500, 3_000, RATE)
    looks = ((0.0, 0, 3_000, 500_000), (0.125, 98_000, 3_000, 400_000), (0.25, 150_000, 0, 350_000))
    for at, left, waiting, behind in looks:
        one.read(at, left, waiting, RATE, behind)
    assert one.use == QueueUse(0.125, 98_000, 125_000)


def test_a_new_rate_starts_a_new_interval() -> None:
    one = Backlog()
    one.read(-0.125, -1_500, 3_000, RATE)
    one.read(0.0, 0, 200_000, RATE)
    one.read(0.125, 125_000, 100_000, RATE)
    one.read(0.125, 125_000, 100_000, RATE // 2)
    one.read(0.25, 187_500, 37_500, RATE // 2)
    assert one.use == QueueUse(0.25, 187_500, 187_500)


def test_paused_time_is_not_counted() -> None:
    one = Backlog()
    one.read(0.0, 0, 200_000, RATE)
    one.pause()
    one.read(5.0, 0, 200_000, RATE)
    one.read(5.125, 100_000, 200_000, RATE)  # the first departure after the pause
    one.read(5.25, 200_000, 100_000, RATE)
    assert one.use == QueueUse(0.125, 100_000, 125_000)


def test_slow_link_is_measured_from_packet_to_packet() -> None:
    """Five packets of 1,500 bytes at 20 kbit/s, 0.6 s each, in readings 0.1 s apart. The bucket lets the
    first pass at once, and the second after 0.3 s: only the next two are measured. After the last one
    the queue is empty, and may have been so for a while."""
    one = Backlog()
    for step in range(25):
        gone = 1 + (step + 3) // 6
        one.read(step / 10, 1_500 * gone, 1_500 * (5 - gone), 20_000)
    assert one.use.busy == pytest.approx(1.2)
    assert (one.use.left, one.use.allowed) == (3_000, 3_000)


@pytest.mark.parametrize(
    ("rate", "stuck"),
    [
        (RATE, {1.0, 1.5}),
        (30_000, {1.5}),  # three packets take 1.2 s
        (None, set()),
    ],
)
def test_a_queue_from_which_nothing_leaves_is_stuck(rate: int | None, stuck: set[float]) -> None:
    one = Backlog()
    found = set()
    for at in (0.0, 0.5, 1.0, 1.5):
        one.read(at, 7, 2962, rate)
        if one.stuck_since is not None:
            assert one.stuck_since == 0.0
            found.add(at)
    assert found == stuck
    one.read(2.0, 2969, 0, rate)
    assert one.stuck_since is None
