"""Max-min fair rates over trees of segments in virtual time: closed forms, random trees, background.

1 kbit/s is 125 bytes per second.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.config import AccessLink, Background, DrawnDuration, LocalTraining, Segment
from agents.device_actions import SetBackground
from agents.timing.nanoseconds import from_seconds, to_seconds
from agents.wire.messages import NetworkUse
from testbed.plan import PlannedDevice
from testbed.segments.simulated import SegmentTraffic
from testbed.virtual.fair_shares import FairShares, Pipe
from testbed.virtual.network import VirtualNetwork
from testbed.virtual.timing import SCENARIO, EventQueue
from tests.testbed.devices import play

KBIT = 1_000


def _device(name: str, *path: Segment, **fields: Any) -> PlannedDevice:
    local = LocalTraining(steps=1)
    return PlannedDevice(name=name, group=name, cpu=None, memory=0, local=local, path=path, **fields)


class Uploads:
    """Uploads at given times, and the times of their arrivals."""

    def __init__(self, *segments: Segment, packets: bool = False) -> None:
        self.queue = EventQueue()
        self.network = VirtualNetwork(self.queue, 0, packets=packets)
        self.used: list[NetworkUse] = []
        self.arrivals: dict[str, float] = {}
        self.traffic = SegmentTraffic(
            self.queue,
            self.network,
            {one.name: one for one in segments},
            {one.name: () for one in segments},
            0,
            self.used.append,
        )

    def send(self, at: float, device: PlannedDevice, size: int) -> None:
        line = self.network.line(device)

        def note(arrived: int) -> None:
            self.arrivals[device.name] = to_seconds(arrived)

        self.at(at, lambda: line.upload(size, note))

    def at(self, time: float, callback: Any) -> None:
        self.queue.plan(from_seconds(time), SCENARIO, 0, callback)

    def play(self, until: float = math.inf) -> dict[str, float]:
        while self.queue.next is not None and to_seconds(self.queue.next) <= until:
            self.queue.now = self.queue.next
            while (callback := self.queue.pop_due()) is not None:
                callback()
        return self.arrivals


def test_two_levels_limit_each_device_where_it_is_slowest() -> None:
    """`a` and `b` share a cell of 10 kbit/s, `c` has the other 20 kbit/s of the backhaul."""
    backhaul = Segment("backhaul", up=30 * KBIT)
    cell = Segment("cell", "backhaul", up=10 * KBIT)
    uploads = Uploads(backhaul, cell)
    for name in "ab":
        uploads.send(0.0, _device(name, cell, backhaul), 10 * 125)
    uploads.send(0.0, _device("c", backhaul), 40 * 125)
    assert uploads.play() == {"a": 2.0, "b": 2.0, "c": 2.0}
    uploads.traffic.record(at_end=True)
    (use,) = uploads.used
    assert use.seconds == 2.0
    assert {one.segment: dict(one.devices) for one in use.segments} == {
        "backhaul": {"a": 1250, "b": 1250, "c": 5000},
        "cell": {"a": 1250, "b": 1250},
    }


def test_delay_of_the_segments_is_added() -> None:
    backhaul = Segment("backhaul", up=30 * KBIT, rtt=0.2)
    cell = Segment("cell", "backhaul", rtt=0.4)
    uploads = Uploads(backhaul, cell)
    uploads.send(0.0, _device("a", cell, backhaul, link=AccessLink(rtt=0.6)), 30 * 125)
    assert uploads.play() == {"a": pytest.approx(1.6)}


def test_changed_and_cut_segment_applies_to_transfers_in_progress() -> None:
    """10 kbit pass until 1 s, 5 until 2 s, none until 4 s, and 5 after that."""
    cell = Segment("cell", up=10 * KBIT)
    uploads = Uploads(cell)
    uploads.send(0.0, _device("a", cell), 20 * 125)
    uploads.at(1.0, lambda: uploads.network.change("cell", {"up": 5 * KBIT}))
    uploads.at(2.0, lambda: uploads.network.cut("cell", is_cut=True))
    uploads.at(4.0, lambda: uploads.network.cut("cell", is_cut=False))
    assert uploads.play() == {"a": 5.0}


def test_cut_comes_before_the_end_of_a_transfer_at_the_same_moment() -> None:
    """The last bit would have passed at 2 s, when the segment is cut: the message waits until 4 s."""
    cell = Segment("cell", up=10 * KBIT)
    uploads = Uploads(cell)
    uploads.send(0.0, _device("a", cell), 20 * 125)
    uploads.at(2.0, lambda: uploads.network.cut("cell", is_cut=True))
    uploads.at(4.0, lambda: uploads.network.cut("cell", is_cut=False))
    assert uploads.play() == {"a": 4.0}


def test_every_bucket_of_a_path_gives_its_tokens() -> None:
    """A message of 600 bits finds 1,000 and 400 tokens: 400 pass at once, and both buckets lose them."""
    shares = FairShares(EventQueue())
    cell, backhaul = shares.add(Pipe()), shares.add(Pipe())
    shares.set_rate(cell, 10.0 * KBIT, 1_000.0)
    shares.set_rate(backhaul, 10.0 * KBIT, 400.0)
    shares.leave(shares.enter(600.0, (cell, backhaul), lambda: None))
    assert (cell.saved, backhaul.saved) == (600.0, 0.0)


def test_rounding_error_of_a_full_pipe_is_no_capacity() -> None:
    """Ten senders leave 1e-8 of 10,000 bit/s."""
    queue = EventQueue()
    shares = FairShares(queue)
    pipe = shares.add(Pipe())
    shares.set_rate(pipe, 10.0 * KBIT)
    for source in range(10):
        shares.set_fixed(source, (pipe,), 10.0 * KBIT / 10.000000000001)
    shares.enter(1.0, (pipe,), lambda: None)
    assert queue.next is None


def test_constant_background_takes_its_rate_first() -> None:
    """Half of 10 kbit/s is left until the background is off at 2 s."""
    half = Background(0, "up", "constant", {"rate": 5.0 * KBIT})
    cell = Segment("cell", up=10 * KBIT, background=(half,))
    uploads = Uploads(cell)
    uploads.traffic.start()
    uploads.send(0.0, _device("a", cell), 20 * 125)
    uploads.at(2.0, lambda: uploads.traffic.act("cell", SetBackground(on=False)))
    assert uploads.play() == {"a": 3.0}
    uploads.traffic.record(at_end=True)
    (one,) = uploads.used[0].segments
    assert (dict(one.devices), one.background) == ({"a": 20 * 125}, 10 * 125)


def test_background_leaves_a_segment_without_a_rate_alone() -> None:
    """`place` has no rate of its own; half of the 10 kbit/s of the cell above it is left."""
    half = Background(0, "up", "constant", {"rate": 5.0 * KBIT})
    cell = Segment("cell", up=10 * KBIT, background=(half,))
    uploads = Uploads(cell, place := Segment("place", "cell"))
    uploads.traffic.start()
    uploads.send(0.0, _device("a", place, cell), 20 * 125)
    assert uploads.play() == {"a": 4.0}


def test_background_that_fills_a_segment_leaves_nothing_until_it_ends() -> None:
    wanted = {"rate": 50.0 * KBIT, "on": DrawnDuration("constant", {"value": 2.0})}
    wanted["off"] = DrawnDuration("constant", {"value": 1.0})
    cell = Segment("cell", up=10 * KBIT, background=(Background(0, "up", "on_off", wanted),))
    uploads = Uploads(cell)
    uploads.traffic.start()
    uploads.send(0.0, _device("a", cell), 15 * 125)
    assert uploads.play(10.0) == {"a": 3.5}  # off until 1 s, on until 3 s


def test_flows_share_like_devices_and_end_when_switched_off() -> None:
    flows = Background(
        0, "up", "flows", {"arrivals": 1000.0, "size": DrawnDuration("constant", {"value": 1e9})}
    )
    cell = Segment("cell", up=10 * KBIT, background=(flows,))
    uploads = Uploads(cell)
    uploads.traffic.start()
    uploads.send(0.0, _device("a", cell), 10 * 125)
    uploads.at(0.5, lambda: uploads.traffic.act("cell", SetBackground(on=False)))
    arrived = uploads.play(3.0)["a"]
    assert 1.3 < arrived < 1.5  # almost nothing until 0.5 s
    assert uploads.traffic.planned == 1


@pytest.mark.parametrize(("packets", "wire"), [(False, 3000), (True, 3000 + 3 * 66)])
def test_background_transfers_have_packet_headers_as_on_emulated_links(packets: bool, wire: int) -> None:
    size = DrawnDuration("constant", {"value": 3000.0})
    flows = Background(0, "up", "flows", {"arrivals": 1.0, "size": size})
    uploads = Uploads(Segment("cell", up=1_000 * KBIT, background=(flows,)), packets=packets)
    uploads.traffic.start()
    uploads.play(60.0)
    uploads.traffic.record(at_end=True)
    count, rest = divmod(uploads.used[0].segments[0].background, wire)
    assert (rest, count > 10) == (0, True)


class _Tree:
    """A random tree of pipes with transfers, computed both ways."""

    def __init__(self, parents: list[int], rates: list[int]) -> None:
        self.parents, self.rates = parents, [float(rate) for rate in rates]

    def path(self, leaf: int) -> list[int]:
        found = [leaf]
        while self.parents[found[-1]] < found[-1]:
            found.append(self.parents[found[-1]])
        return found


@st.composite
def _trees(draw: st.DrawFn) -> tuple[_Tree, list[tuple[int, int, int, int]]]:
    """(tree, transfers); a transfer is (start in s, bits, leaf, own limit; 0 for none)."""
    pipes = draw(st.integers(1, 5))
    parents = [0] + [draw(st.integers(0, k - 1)) for k in range(1, pipes)]
    rates = [draw(st.integers(1, 12)) for _ in range(pipes)]
    one = st.tuples(
        st.integers(0, 4),
        st.integers(1, 30),
        st.integers(0, pipes - 1),
        st.sampled_from([0, 0, 1, 2, 3, 4, 5]),
    )
    return _Tree(parents, rates), draw(st.lists(one, min_size=1, max_size=10))


def _shared(queue: EventQueue, tree: _Tree) -> tuple[FairShares, list[Pipe]]:
    """Return the shares of a tree, and its pipes with their rates."""
    shares = FairShares(queue)
    pipes = [shares.add(Pipe()) for _ in tree.rates]
    for pipe, rate in zip(pipes, tree.rates, strict=True):
        shares.set_rate(pipe, rate)
    return shares, pipes


@given(_trees())
def test_rates_are_max_min_fair_on_any_tree(
    drawn: tuple[_Tree, list[tuple[int, int, int, int]]],
) -> None:
    """Against rates that are computed anew in small steps of the level: bits, ends, and each rate's
    bottleneck."""
    tree, transfers = drawn
    queue = EventQueue()
    shares, pipes = _shared(queue, tree)
    ended = [-1.0] * len(transfers)

    def end(number: int) -> None:
        ended[number] = to_seconds(queue.now)

    def begin(number: int) -> None:
        _, bits, leaf, own = transfers[number]
        path = tuple(pipes[k] for k in tree.path(leaf))
        done = functools.partial(end, number)
        shares.enter(bits, path, done, own=float(own) or math.inf, device=str(number))

    for number, (start, *_) in enumerate(transfers):
        queue.plan(from_seconds(float(start)), SCENARIO, 0, functools.partial(begin, number))
    play(queue)
    assert ended == pytest.approx(_naive_ends(tree, transfers), abs=1e-6)
    for number, (_, bits, leaf, _) in enumerate(transfers):
        for k, pipe in enumerate(pipes):  # each pipe on the path has carried each bit once
            carried = pipe.devices_bits.get(str(number), 0.0)
            assert carried == pytest.approx(bits if k in tree.path(leaf) else 0.0, abs=1e-6)


def _naive_ends(tree: _Tree, transfers: list[tuple[int, int, int, int]]) -> list[float]:
    left = {k: float(bits) for k, (_, bits, _, _) in enumerate(transfers)}
    ended, now = [0.0] * len(transfers), 0.0
    while left:
        here = [k for k in left if transfers[k][0] <= now]
        rates = _naive_rates(tree, {k: transfers[k] for k in here})
        _check_bottlenecks(tree, transfers, rates)
        ends = [now + left[k] / rates[k] for k in here]
        starts = [float(transfers[k][0]) for k in left if transfers[k][0] > now]
        until = min(ends + starts)
        for k in here:
            left[k] -= (until - now) * rates[k]
            if left[k] < 1e-9:
                del left[k]
                ended[k] = until
        now = until
    return ended


def _naive_rates(tree: _Tree, active: dict[int, tuple[int, int, int, int]]) -> dict[int, float]:
    """Raise all rates together; stop each at its own limit, or when a pipe is full."""
    rates, rising = dict.fromkeys(active, 0.0), set(active)
    while rising:
        steps = [active[k][3] - rates[k] for k in rising if active[k][3]]
        for pipe, rate in enumerate(tree.rates):
            users = [k for k in active if pipe in tree.path(active[k][2])]
            if up := rising & set(users):
                steps.append((rate - sum(rates[k] for k in users)) / len(up))
        step = max(0.0, min(steps))
        for k in rising:
            rates[k] += step
        full = {
            pipe
            for pipe, rate in enumerate(tree.rates)
            if sum(rates[k] for k in active if pipe in tree.path(active[k][2])) > rate - 1e-9
        }
        rising = {
            k
            for k in rising
            if not full & set(tree.path(active[k][2]))
            and not (active[k][3] and rates[k] > active[k][3] - 1e-9)
        }
    return rates


def _check_bottlenecks(
    tree: _Tree, transfers: list[tuple[int, int, int, int]], rates: dict[int, float]
) -> None:
    """No pipe carries more than its rate. Each transfer has its own limit, or one of the highest rates
    in a full pipe."""
    for k, rate in rates.items():
        own = transfers[k][3]
        limited = bool(own) and rate > own - 1e-6
        for pipe in tree.path(transfers[k][2]):
            users = [rates[other] for other in rates if pipe in tree.path(transfers[other][2])]
            assert sum(users) < tree.rates[pipe] + 1e-6
            limited |= sum(users) > tree.rates[pipe] - 1e-6 and rate > max(users) - 1e-6
        assert limited


@given(_trees(), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), max_size=5))
def test_rates_stay_max_min_fair_when_pipes_and_transfers_change(
    drawn: tuple[_Tree, list[tuple[int, int, int, int]]], changes: list[tuple[int, int]]
) -> None:
    """One change a second: a transfer begins, or a pipe gets another rate, or the oldest transfer is
    taken out. Each time all rates are compared with those computed anew."""
    tree, transfers = drawn
    queue = EventQueue()
    shares, pipes = _shared(queue, tree)
    active: dict[int, tuple[int, int, int, int]] = {}
    made = {}
    steps: list[Any] = [*enumerate(transfers), *changes, *[None] * len(transfers)]
    for at, step in enumerate(sorted(steps, key=repr)):  # an arbitrary order, the same each time
        queue.now = from_seconds(float(at))
        match step:
            case (number, (_, _, leaf, own) as transfer):
                path = tuple(pipes[k] for k in tree.path(leaf))
                made[number] = shares.enter(1e9, path, lambda: None, own=float(own) or math.inf)
                active[number] = transfer
            case (int(place), int(rate)) if place < len(pipes):
                tree.rates[place] = float(rate)
                shares.set_rate(pipes[place], float(rate))
            case None if made:
                oldest = min(made)
                shares.leave(made.pop(oldest))
                del active[oldest]
        rates = {number: one.in_class.rate for number, one in made.items() if one.in_class is not None}
        assert rates == pytest.approx(_naive_rates(tree, active), abs=1e-9)


def test_hundred_devices_with_limits_of_their_own_share_a_cell() -> None:
    """100 bit/s ten times, and 1, 2, … 90 bit/s. In 10,000 bit/s all are at their limits. In 3,000 bit/s
    those up to 36 are (666 bit/s together), and the other 64 have 2,334 / 64 = 36.47 bit/s each."""
    queue = EventQueue()
    shares = FairShares(queue)
    cell = shares.add(Pipe())
    shares.set_rate(cell, 10_000.0)
    limits = [100.0] * 10 + [float(limit) for limit in range(1, 91)]
    made = [shares.enter(1e9, (cell,), lambda: None, own=limit) for limit in limits]

    def rates() -> list[float]:
        return [one.in_class.rate for one in made if one.in_class is not None]

    assert rates() == limits
    shares.set_rate(cell, 3_000.0)
    assert rates() == [min(2334 / 64, one) for one in limits]
