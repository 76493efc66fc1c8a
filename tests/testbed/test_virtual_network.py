"""Transfers in virtual time, by hand: alone, one after the other, shared, and when the link changes.

1 Mbit/s is 125,000 bytes per second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.config import AccessLink, LocalTraining, Segment
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from testbed.plan import PlannedDevice
from testbed.virtual.fair_shares import FairShares, Pipe
from testbed.virtual.network import Line, VirtualNetwork
from testbed.virtual.timing import SCENARIO, EventQueue
from tests.testbed.devices import play

MBIT = 1_000_000
SECOND = 125_000
"""Bytes that take a second at 1 Mbit/s."""


def _device(name: str = "a", **fields: Any) -> PlannedDevice:
    return PlannedDevice(
        name=name, group=name, cpu=None, memory=0, local=LocalTraining(steps=1), **fields
    )


class Times:
    """Plays what is planned, and notes when messages arrive."""

    def __init__(
        self,
        server_link: AccessLink | None = None,
        seed: int = 0,
        *,
        packets: bool = False,
    ) -> None:
        self.queue = EventQueue()
        self.network = VirtualNetwork(self.queue, seed, server_link, packets=packets)
        self.arrivals: list[tuple[str, float]] = []

    def at(self, time: float, happens: Callable[[], None]) -> None:
        self.queue.plan(from_seconds(time), SCENARIO, 0, happens)

    def noted(self, name: str) -> Callable[[Nanoseconds], None]:
        return lambda at: self.arrivals.append((name, to_seconds(at)))

    def upload(self, at: float, line: Line, size: int, name: str = "") -> None:
        self.at(at, lambda: line.upload(size, self.noted(name)))

    def download(self, at: float, line: Line, size: int, name: str = "") -> None:
        self.at(at, lambda: line.download(size, self.noted(name)))

    def play(self) -> list[tuple[str, float]]:
        """Run to the end; record arrivals to the nanosecond."""
        play(self.queue)
        return self.arrivals

    def play_times(self) -> list[float]:
        return [at for _, at in self.play()]


unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""


def test_messages_of_a_device_are_sent_one_after_the_other() -> None:
    times = Times()
    line = times.network.line(_device(link=AccessLink(up=MBIT, rtt=0.2)))
    for at in (0.0, 0.1, 2.0):
        times.upload(at, line, SECOND // 2)
    assert times.play_times() == [0.6, 1.1, 2.6]


def test_directions_are_separate_links() -> None:
    times = Times()
    line = times.network.line(_device(link=AccessLink(up=MBIT, down=2 * MBIT)))
    times.upload(0.0, line, SECOND, "up")
    times.download(0.0, line, SECOND, "down")
    assert times.play() == [("down", 0.5), ("up", 1.0)]


def test_unlimited_link_takes_half_a_round_trip() -> None:
    times = Times()
    times.network.line(_device(link=AccessLink())).download(SECOND, times.noted("at once"))
    line = times.network.line(_device(link=AccessLink(rtt=0.2)))
    for name in ("first", "second"):
        line.download(SECOND, times.noted(name))
    assert times.arrivals == [("at once", 0.0), ("first", 0.1), ("second", 0.1)]
    assert times.queue.next is None


def test_slowest_link_on_the_path_limits_the_rate() -> None:
    times = Times(AccessLink(up=4 * MBIT, down=2 * MBIT))
    cell = Segment("cell", up=4 * MBIT, down=MBIT)
    line = times.network.line(_device(link=AccessLink(up=8 * MBIT, down=8 * MBIT), path=(cell,)))
    times.upload(0.0, line, SECOND, "up")
    times.download(0.0, line, SECOND, "down")
    assert times.play() == [("up", 0.5), ("down", 1.0)]


def test_two_devices_share_a_cell_equally() -> None:
    """The second begins when the first is half through: 0.5 Mbit are left at 0.5 Mbit/s."""
    times = Times()
    cell = Segment("cell", up=MBIT, down=None)
    first, second = (times.network.line(_device(name, path=(cell,))) for name in "ab")
    times.upload(0.0, first, SECOND, "a")
    times.upload(0.5, second, SECOND, "b")
    assert times.play() == [("a", 1.5), ("b", 2.0)]


def test_separate_cells_are_not_shared() -> None:
    times = Times()
    for name in "ab":
        line = times.network.line(_device(name, path=(Segment(name, up=MBIT, down=None),)))
        times.upload(0.0, line, SECOND, name)
    assert times.play() == [("a", 1.0), ("b", 1.0)]


def test_device_has_one_share_of_a_cell_for_all_its_messages() -> None:
    """`a` has two messages, `b` one: `b` has half until it is through, at 2 s."""
    times = Times()
    cell = Segment("cell", up=MBIT, down=None)
    first, second = (times.network.line(_device(name, path=(cell,))) for name in "ab")
    for line, name in ((first, "a1"), (first, "a2"), (second, "b")):
        times.upload(0.0, line, SECOND, name)
    assert times.play() == [("a1", 2.0), ("b", 2.0), ("a2", 3.0)]


def test_slow_upload_does_not_block_others_at_the_server() -> None:
    times = Times(AccessLink(down=MBIT))
    slow = times.network.line(_device("slow", link=AccessLink(up=MBIT // 100)))
    fast = times.network.line(_device("fast"))
    times.upload(0.0, slow, SECOND, "slow")
    times.upload(3.0, fast, SECOND, "fast")
    found = times.play()
    assert [name for name, _ in found] == ["fast", "slow"]
    assert [at for _, at in found] == pytest.approx([3 + 1 / 0.99, 100.0])  # 990 kbit/s are left


def test_concurrent_transfers_share_the_server_rate() -> None:
    times = Times(AccessLink(up=MBIT))
    for k in range(100):
        line = times.network.line(_device(f"d{k}", link=AccessLink(down=MBIT)))
        times.download(0.0, line, SECOND, f"d{k}")
    assert times.play() == [(f"d{k}", 100.0) for k in range(100)]


def test_request_does_not_overtake_a_model() -> None:
    times = Times()
    line = times.network.line(_device(link=AccessLink(down=MBIT, rtt=0.2)))
    times.at(0.0, lambda: line.download(0, times.noted("first")))
    times.download(0.0, line, SECOND, "model")
    times.at(0.5, lambda: line.download(0, times.noted("second")))
    assert times.play() == [("first", 0.1), ("model", 1.1), ("second", 1.1)]


@pytest.mark.parametrize(
    ("changes", "arrives"),
    [
        ([(10.5, {"up": MBIT // 2})], 11.5),
        ([(10.5, {"up": MBIT // 2}), (11.0, {"up": 2 * MBIT})], 11.125),
        ([(10.5, {"up": None})], 10.5),
        ([(10.5, {"down": 1_000})], 11.0),
        ([(10.5, {"rtt": 1.0})], 11.5),
        ([(11.0, {"up": 1_000})], 11.0),  # it is through
        ([(10.25, {"loss": 1.0}), (12.0, {"loss": 0.0})], 12.75),
    ],
)
def test_transfer_continues_at_the_new_rate(
    changes: list[tuple[float, dict[str, float | None]]], arrives: float
) -> None:
    times = Times()
    line = times.network.line(_device(link=AccessLink(up=MBIT)))
    times.upload(10.0, line, SECOND)
    for at, change in changes:
        times.at(at, functools.partial(line.change, change))
    assert times.play_times() == [arrives]


def test_link_with_full_loss_passes_nothing() -> None:
    times = Times()
    times.upload(0.0, times.network.line(_device(link=AccessLink(loss=1.0))), SECOND)
    assert times.play() == []


def test_lost_packets_are_retransmitted() -> None:
    """6 % of 1000 s; the last packet may take a few time-outs of 0.2 s, 0.4 s, ..."""
    times = Times()
    line = times.network.line(_device(link=AccessLink(up=100_000, loss=0.06)))
    times.upload(0.0, line, 94_000 * 1000 // 8)
    assert times.play_times() == [pytest.approx(1000, abs=5)]


def test_limit_set_during_a_transfer_applies_to_the_rest() -> None:
    """Half of it has passed the cell when the device's own link becomes slow."""
    times = Times()
    line = times.network.line(_device(path=(Segment("cell", up=MBIT, down=None),)))
    times.upload(0.0, line, SECOND)
    times.at(0.5, lambda: line.change({"up": MBIT // 10}))
    assert times.play_times() == [5.5]


@pytest.mark.parametrize(
    ("change", "arrives"),
    [
        ({"down": MBIT}, 1 + 2 / 3),  # the other way: from 1 s on, the device's own link limits it
        ({"up": MBIT // 2}, 2.0),
    ],
)
def test_change_applies_to_bytes_that_have_not_passed(
    change: dict[str, float | None], arrives: float
) -> None:
    """After a second half of the message has passed the cell, which is shared until then."""
    times = Times()
    cell = Segment("cell", up=MBIT, down=None)
    line = times.network.line(_device(path=(cell,), link=AccessLink(up=MBIT * 3 // 4)))
    times.upload(0.0, line, SECOND, "a")
    times.upload(0.0, times.network.line(_device("b", path=(cell,))), SECOND // 2, "b")
    times.at(1.0, lambda: line.change(change))
    assert times.play() == [("b", 1.0), ("a", pytest.approx(arrives))]


def test_disconnected_device_passes_nothing_and_frees_its_share() -> None:
    times = Times()
    cell = Segment("cell", up=MBIT, down=None)
    first, second = (times.network.line(_device(name, path=(cell,))) for name in "ab")
    times.upload(0.0, first, SECOND, "a")
    times.upload(0.0, second, SECOND, "b")
    times.at(1.0, lambda: first.plug(connected=False))  # half of each is through
    times.at(1.25, lambda: first.download(0, times.noted("request")))
    times.at(3.0, lambda: first.plug(connected=True))
    assert times.play() == [("b", 1.5), ("request", 3.0), ("a", 3.5)]


@pytest.mark.parametrize("way", ["up", "down"])
def test_messages_lost_in_a_crash_do_not_block_others(way: str) -> None:
    times = Times()
    cell = Segment("cell", up=MBIT, down=MBIT)
    first, second = (times.network.line(_device(name, path=(cell,))) for name in "ab")
    send = times.upload if way == "up" else times.download
    for line, name in ((first, "lost"), (first, "lost too"), (second, "b")):
        send(0.0, line, SECOND, name)
    times.at(1.2, first.drop)
    send(2.0, first, SECOND, "a")
    assert times.play() == [("b", 1.6), ("a", 3.0)]


def test_lost_message_does_not_delay_the_next() -> None:
    """The lost message would have arrived at 10 s."""
    times = Times()
    line = times.network.line(_device(link=AccessLink(rtt=20.0)))
    line.download(0, times.noted("lost"))
    line.drop()
    line.change({"rtt": 0.0})
    line.download(0, times.noted("next"))
    assert times.arrivals == [("lost", 10.0), ("next", 0.0)]


def test_jitter_and_loss_are_per_device_and_keep_the_order() -> None:
    link = AccessLink(up=MBIT, rtt=0.2, jitter=0.1, loss=0.2)

    def arrivals(*names: str, seed: int = 0) -> list[float]:
        """Return the arrival times of the first device's messages."""
        times = Times(seed=seed)
        lines = [times.network.line(_device(name, link=link)) for name in names]
        for k in range(100):
            for line, name in zip(lines, names, strict=True):
                times.upload(k * 0.01, line, 125, name)
        times.play()
        return [at for name, at in times.arrivals if name == names[0]]

    alone = arrivals("a")
    assert alone == arrivals("a", "b")
    assert alone == sorted(alone)
    assert alone != arrivals("b")
    assert alone != arrivals("a", seed=1)
    assert alone[0] > 0.001
    assert alone[-1] > 1.0


@pytest.mark.parametrize("link", [AccessLink(jitter=0.1, rtt=0.2), AccessLink(loss=0.5)])
def test_jitter_and_loss_are_drawn_per_message(link: AccessLink) -> None:
    times = Times()
    line = times.network.line(_device(link=link))
    for k in range(8):
        times.at(1000 * k, lambda: line.download(0, times.noted("")))
    delays = {round(at % 1000, 6) for at in times.play_times()}
    assert len(delays) > 1


def test_deterministic_links_draw_no_random_numbers() -> None:
    def generator() -> np.random.Generator:
        raise AssertionError

    arrivals: list[Nanoseconds] = []
    line = Line(
        EventQueue(),
        AccessLink(rtt=0.2),
        ((None, ()), (None, ())),
        generator,
        packets=False,
    )
    line.download(0, arrivals.append)
    assert arrivals == [100_000_000]


@unhurried
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=12))
def test_shared_link_is_fair_bit_by_bit(flows: list[tuple[int, int]]) -> None:
    """(start in s, size in bit) at 1 bit/s, against small steps of time."""
    queue = EventQueue()
    shares = FairShares(queue)
    pipe, ended = shares.add(Pipe(1.0)), [-1.0] * len(flows)
    shares.set_rate(pipe, 1.0)

    def end(number: int) -> None:
        ended[number] = to_seconds(queue.now)

    def begin(size: int, number: int) -> None:
        shares.enter(size, (pipe,), functools.partial(end, number))

    for number, (start, size) in enumerate(flows):
        queue.plan(from_seconds(start), SCENARIO, 0, functools.partial(begin, size, number))
    play(queue)
    assert ended == pytest.approx(_in_turn(flows), abs=1e-6)


def _in_turn(flows: list[tuple[int, int]]) -> list[float]:
    """Return the end time of each flow, recomputing everything at every event."""
    left = dict(enumerate(float(size) for _, size in flows))
    ended, now = [0.0] * len(flows), 0.0
    while left:
        here = [k for k in left if flows[k][0] <= now]
        ends = [now + left[k] * len(here) for k in here]
        starts = [float(start) for k, (start, _) in enumerate(flows) if k in left and start > now]
        until = min(ends + starts)
        for k in here:
            left[k] -= (until - now) / len(here)
            if left[k] < 1e-9:
                del left[k]
                ended[k] = until
        now = until
    return ended


@pytest.mark.parametrize(
    "way",
    [
        {"link": AccessLink(up=100_000)},
        {"path": (Segment("cell", up=100_000), Segment("backhaul", up=200_000))},
    ],
)
def test_headers_count_and_a_full_bucket_passes_at_once(way: dict[str, Any]) -> None:
    """100 kbit/s: 12,500 bytes/s, the bucket holds 1,514 bytes and is full again after 0.12112 s."""
    times = Times(packets=True)
    line = times.network.line(_device(**way))
    size = 3 * 1448 - 64  # 4,542 bytes with all headers; the hops take 1 ms
    for at in (0.0, 0.0, 1.0, 1.3):
        times.upload(at, line, size)
    # The second one follows at once; before the third the bucket is filled for 0.39456 s, so it is full;
    # before the fourth for 0.05776 s.
    assert times.play_times() == pytest.approx([0.24324, 0.6066, 1.24324, 1.6066])


def test_request_has_the_size_of_a_small_message() -> None:
    """194 bytes with all headers; alone it fits into the bucket."""
    times = Times(packets=True)
    line = times.network.line(_device(link=AccessLink(down=100_000)))
    times.download(0.0, line, 0)
    times.download(1.0, line, 3 * 1448 - 64)
    times.download(1.0, line, 0)
    assert times.play_times() == pytest.approx([0.001, 1.24324, 1.24324 + 194 / 12_500])


def test_received_packets_are_acknowledged_on_the_return_path() -> None:
    """Three packets by 202 bytes, a request by 70, which the bucket then lacks."""
    times = Times(packets=True)
    line = times.network.line(_device(link=AccessLink(up=100_000)))
    for at, size, acknowledgement in ((0.0, 3 * 1448 - 64, 202), (1.0, 0, 70)):
        times.arrivals.clear()
        times.download(at, line, size)
        times.upload(at, line, 3 * 1448 - 64)
        assert times.play_times()[-1] == pytest.approx(at + 0.24324 + acknowledgement / 12_500)


def test_size_of_an_update_depends_on_its_header_digits() -> None:
    times = Times(packets=True)
    line = times.network.line(_device(link=AccessLink(up=100_000)))
    line.hand_in(3 * 1448 - 64 - 72, times.noted("update"))
    assert times.play_times() == pytest.approx([0.24324])


def test_aggregator_acknowledges_an_update() -> None:
    times = Times(packets=True)
    line = times.network.line(_device(link=AccessLink(up=100_000)))
    line.acknowledge()
    times.upload(0.0, line, 3 * 1448 - 64)
    assert times.play_times() == pytest.approx([0.24324 + 70 / 12_500])


@unhurried
@given(
    st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 20_000)), min_size=1, max_size=8),
    st.sampled_from([50_000, 1_000_000, 20_000_000]),
)
def test_unlimited_segment_changes_no_time(sends: list[tuple[int, int]], rate: int) -> None:
    found = []
    for path in ((), (Segment("free"),)):
        times = Times(packets=True)
        line = times.network.line(_device(link=AccessLink(up=rate), path=path))
        for at, size in sorted(sends):
            times.upload(at / 1e3, line, size)
        found.append(times.play_times())
    assert found[0] == pytest.approx(found[1], abs=1e-7)
