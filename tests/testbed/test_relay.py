"""The relay with real sockets: outcome of streams, whatever their two ends do."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from agents.config import AccessLink, Segment
from agents.device_actions import Disconnect, Reconnect, SetLink
from agents.links import packets
from testbed.relay import relay_process
from testbed.relay.main import OwnLink
from testbed.relay.segments import SegmentLane, SegmentScheduler, SharedSegments
from testbed.relay.sockets import Lane, Relay, Traffic, on_wire
from tests.waiting import eventually

HOST = "127.0.0.1"
Connect = Callable[[], tuple[socket.socket, socket.socket]]
"""The ends of a new connection: the device's and the broker's."""
Through = Callable[..., Connect]
Of = Callable[[AccessLink], OwnLink]
CELL = 4_000_000
"""bit/s."""


@pytest.fixture(scope="module")
def relay() -> Relay:
    relay = Relay()
    threading.Thread(target=relay.serve, daemon=True).start()
    return relay


@pytest.fixture
def through(relay: Relay) -> Iterator[Through]:
    """A function of a link, and of what is shared, that gives one that makes connections through it."""
    with ExitStack() as stack:

        def through(own: OwnLink, up: Sequence[Lane] = (), down: Sequence[Lane] = ()) -> Connect:
            listener = socket.create_server((HOST, 0))
            target = stack.enter_context(socket.create_server((HOST, 0)))
            relay.listen(listener, target.getsockname(), [*up, own.up], [*down, own.down])
            address = listener.getsockname()

            def connect() -> tuple[socket.socket, socket.socket]:
                device = stack.enter_context(socket.create_connection(address, 120))
                broker = stack.enter_context(target.accept()[0])
                broker.settimeout(120)
                return device, broker

            return connect

        yield through


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traffic") / "traffic"


@pytest.fixture(scope="module")
def of(traffic: Path) -> Of:
    return lambda link: OwnLink(link, 1, "pi", Traffic(traffic, ["pi"]))


def received(sock: socket.socket) -> bytes:
    """All until the stream's end."""
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def sent(sock: socket.socket, data: bytes) -> None:
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)


def test_streams_arrive_complete_before_their_ends(through: Through, of: Of) -> None:
    connect = through(of(AccessLink(50_000_000, 50_000_000, rtt=0.02, jitter=0.005)))
    ends = [connect(), connect()]  # which share the link
    data = [os.urandom(500_000), os.urandom(500_000)]
    begin = time.monotonic()
    for (device, _), some in zip(ends, data, strict=True):
        threading.Thread(target=sent, args=(device, some)).start()
    assert [received(broker) for _, broker in ends] == data
    assert time.monotonic() - begin > 0.15  # 1 MB and its headers: 0.167 s
    for device, broker in ends:  # one way has ended, the other goes on
        sent(broker, b"thanks")
        assert received(device) == b"thanks"


def test_connection_of_a_vanished_device_is_kept_until_the_broker_closes_it(
    through: Through, of: Of, caplog: pytest.LogCaptureFixture
) -> None:
    gc.freeze()  # garbage that other tests have left is not looked at
    device, broker = through(of(AccessLink()))()
    device.close()
    assert received(broker) == b""
    time.sleep(0.05)  # asyncio forgets the device's end
    gc.collect()
    assert not caplog.messages


def test_sender_blocks_when_the_receiver_does_not_read(through: Through, of: Of) -> None:
    device, broker = through(of(AccessLink()))()
    device.settimeout(0.5)
    passed = 0
    with suppress(TimeoutError):
        while passed < 64_000_000:
            passed += device.send(bytes(1 << 16))
    assert passed < 32_000_000  # what the two kernels hold, and a little
    device.close()
    assert len(received(broker)) == passed


@pytest.mark.parametrize("link", [AccessLink(), AccessLink(rtt=0.1)])
def test_reset_closes_the_other_side(link: AccessLink, through: Through, of: Of) -> None:
    device, broker = through(of(link))()
    device.sendall(b"last words")
    assert broker.recv(4) == b"last"
    device.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    device.close()
    assert received(broker) == b" words"


def test_reset_does_not_affect_other_connections(through: Through, of: Of) -> None:
    connect = through(of(AccessLink(rtt=0.1)))
    (device, broker), (other_device, other_broker) = connect(), connect()
    sent(broker, bytes(1000))
    time.sleep(0.02)  # the bytes and the end are under way to a device that is no longer there
    device.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    device.close()
    sent(other_broker, b"later")
    assert received(other_device) == b"later"


def test_unreachable_target_closes_the_devices_connection(relay: Relay, of: Of) -> None:
    with socket.create_server((HOST, 0)) as gone:
        target = gone.getsockname()
    listener = socket.create_server((HOST, 0))
    access = of(AccessLink())
    relay.listen(listener, target, [access.up], [access.down])
    with socket.create_connection(listener.getsockname(), 120) as device:
        assert device.recv(1) == b""


def test_outage_blocks_data_and_keeps_the_connection(relay: Relay, through: Through, of: Of) -> None:
    access = of(AccessLink(rtt=0.02))
    device, broker = through(access)()
    applied = threading.Event()
    relay.submit(partial(access.apply, Disconnect()))
    relay.submit(applied.set)
    assert applied.wait(120)
    device.sendall(b"up")
    broker.sendall(b"down")
    broker.settimeout(0.2)
    with pytest.raises(TimeoutError):
        broker.recv(1)
    broker.settimeout(120)
    relay.submit(partial(access.apply, Reconnect()))
    assert broker.recv(8) == b"up"
    assert device.recv(8) == b"down"


def test_passed_bytes_are_counted_in_a_shared_file(through: Through, of: Of, traffic: Path) -> None:
    before = Traffic(traffic, ["pi"]).telemetry_fields("pi")
    device, broker = through(of(AccessLink(rtt=0.02)))()
    sent(device, bytes(1000))
    sent(broker, bytes(2000))
    assert (len(received(broker)), len(received(device))) == (1000, 2000)
    after = Traffic(traffic, ["pi"]).telemetry_fields("pi")
    grown = {way: after[way] - before[way] for way in after}
    assert grown == {"sent": on_wire(1000), "received": on_wire(2000)}


@pytest.mark.timed
def test_change_affects_only_the_named_fields(relay: Relay, through: Through, of: Of) -> None:
    access = of(AccessLink(up=1_000_000, rtt=0.4))
    device, broker = through(access)()
    relay.submit(partial(access.apply, SetLink({"rtt": 0.02})))
    assert access.link.up == 1_000_000
    time.sleep(0.05)
    begin = time.monotonic()
    device.sendall(bytes(20_000))
    device.shutdown(socket.SHUT_WR)
    assert len(received(broker)) == 20_000
    # 14 packets, of which the bucket holds one: 0.158 s, and 0.01 s under way.
    assert time.monotonic() - begin == pytest.approx(0.168, abs=0.05)


def _lanes(shared: SharedSegments, device: str) -> tuple[list[SegmentLane], list[SegmentLane]]:
    return shared.lane(device, "up"), shared.lane(device, "down")


def test_segments_are_shared_max_min_over_a_tree() -> None:
    """120 kB pass the backhaul in two seconds. A cell of a quarter of its rate leaves three quarters to
    the third device; a cell that does not limit leaves a third to each. One item more is in the bucket,
    and one on its way out."""
    names = {"a": "cell", "b": "cell", "c": "backhaul"}

    def passed(cell: int) -> list[int]:
        tree = [Segment("backhaul", up=480_000), Segment("cell", "backhaul", up=cell, rtt=0.5)]
        scheduler = SegmentScheduler(tree, names, "up", lambda: 0.5)
        for name in names:
            for _ in range(200):
                scheduler.put(name, lambda: None, 934, now=0.0)  # 1,000 bytes on the wire
        assert scheduler.pop_due(0.0) == []
        scheduler.pop_due(2.0)
        return [scheduler.passed["backhaul"][name] // 1000 for name in names]

    assert passed(120_000) == pytest.approx([15, 15, 90], abs=2)
    assert passed(480_000) == pytest.approx([40, 40, 40], abs=2)


def test_device_beside_a_slow_one_gets_the_rest_of_its_cell() -> None:
    """The slow device puts 5 of 30 kbit/s in; 7,500 bytes of the other pass at 25 kbit/s in 2.4 s."""
    scheduler = SegmentScheduler([Segment("cell", up=30_000)], dict.fromkeys("ab", "cell"), "up", float)
    ended: list[None] = []
    for _ in range(15):
        scheduler.put("b", lambda: None, 434, now=0.0)
    scheduler.put("b", partial(ended.append, None), 0, now=0.0)
    now = 0.0
    while not ended:
        if round(10 * now) % 8 == 0:
            scheduler.put("a", lambda: None, 434, now)
        now = round(now + 0.1, 1)
        for item in scheduler.pop_due(now):
            item()
    assert now == pytest.approx(2.4, abs=0.4)  # the bucket holds three of the items


@pytest.mark.timed
@pytest.mark.parametrize("upwards", [True, False])
def test_devices_of_a_cell_share_its_rate_equally(upwards: bool, through: Through, of: Of) -> None:
    shared = SharedSegments([Segment("wifi", up=CELL, down=CELL)], dict.fromkeys("abc", "wifi"), 1, 1.0)
    pairs = [through(of(AccessLink(rtt=0.02)), *_lanes(shared, name))() for name in "abc"]
    begin = time.monotonic()
    ended = []

    def receive(sock: socket.socket) -> None:
        assert len(received(sock)) == 200_000
        ended.append(time.monotonic() - begin)

    def each(pair: tuple[socket.socket, socket.socket]) -> Iterator[threading.Thread]:
        source, sink = pair if upwards else pair[::-1]
        yield threading.Thread(target=receive, args=(sink,))
        yield threading.Thread(target=sent, args=(source, bytes(200_000)))

    threads = [thread for pair in pairs for thread in each(pair)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    # 139 packets each, of which the bucket holds one: 416 in 1.26 s, and 0.01 s under way.
    assert max(ended) == pytest.approx(1.27, abs=0.05)
    # The first has 0.2 s of the rate before the others come; one after the other it would be a third.
    assert min(ended) > 0.5 * max(ended)


@pytest.mark.timed
def test_relay_measures_its_segments_alone_and_with_all_devices() -> None:
    segments = [Segment("backhaul", up=2_000_000, down=CELL), Segment("cell", "backhaul", up=500_000)]
    shared = SharedSegments(segments, {"a": "cell", "b": "cell", "c": "backhaul"}, 1, 1.0)
    found = asyncio.run(shared.measure(["backhaul", "cell"])).segments
    assert [(one.segment, one.way, one.reach, one.full) for one in found] == [
        ("backhaul", "up", 2_000_000, 2_000_000),
        ("cell", "up", 500_000, 500_000),
        ("backhaul", "down", CELL, CELL),
    ]
    for one in found:
        assert one.alone == pytest.approx(one.reach, rel=0.05)
        assert one.together == pytest.approx(one.full, rel=0.05)
    assert shared.use() is None


@pytest.mark.timed
def test_slow_segment_is_measured_in_seconds() -> None:
    """At 4 kbit/s a full packet takes 3 s; 8 pieces of 130 bytes on the wire take 2 s."""
    shared = SharedSegments([Segment("cell", up=4_000)], {"a": "cell"}, 1, 1.0)
    begin = time.monotonic()
    (found,) = asyncio.run(shared.measure(["cell"])).segments
    assert found.alone == pytest.approx(4_000, rel=0.05)
    assert time.monotonic() - begin < 5
    assert shared.use() is None


def _filled(cell: Segment) -> SegmentScheduler:
    """A cell in whose uplink 30 packets of device `a` wait."""
    scheduler = SegmentScheduler([cell], {"a": cell.name}, "up", float)
    for _ in range(30):
        scheduler.put("a", lambda: None, 1448, now=0.0)
    return scheduler


def test_background_transfer_shares_a_segment_packet_by_packet() -> None:
    """A transfer of 1 MB takes no more of 120 kbit/s than the device does: 15 packets of 1,514 bytes in
    3 s, of which each has half."""
    scheduler = SegmentScheduler([Segment("cell", up=121_120)], {"a": "cell"}, "up", float)
    scheduler.begin_transfer("cell", 1_000_000, now=0.0)  # before the device's packets
    for _ in range(30):
        scheduler.put("a", lambda: None, 1448, now=0.0)
    scheduler.pop_due(3.0)
    assert scheduler.passed["cell"]["a"] / 1514 == pytest.approx(15, abs=1)
    assert scheduler.passed["cell"][""] / 1514 == pytest.approx(15, abs=2)
    scheduler.drop_background("cell")
    scheduler.pop_due(4.5)
    assert scheduler.passed["cell"]["a"] / 1514 == pytest.approx(30, abs=1)
    assert scheduler.passed["cell"][""] / 1514 == pytest.approx(15, abs=2)


def test_segment_that_becomes_faster_does_not_wait_for_tokens_at_the_old_rate() -> None:
    """At 1 kbit/s a packet takes 12.1 s. At 1 s the segment gets 121,120 bit/s, 10 packets/s: by 2 s ten
    more have passed, less what was missing in the bucket."""
    scheduler = _filled(Segment("cell", up=1_000))
    scheduler.advance(1.0)
    before = scheduler.passed["cell"]["a"] / 1514
    assert before <= 2
    scheduler.change(Segment("cell", up=121_120), now=1.0)
    scheduler.advance(2.0)
    assert scheduler.passed["cell"]["a"] / 1514 - before == pytest.approx(10, abs=1)


def test_measurement_of_a_segment_leaves_the_packets_of_devices_alone() -> None:
    """Ten packets pass in a second; the device's three take turns with the measured ones."""
    scheduler = SegmentScheduler([Segment("cell", up=121_120)], {"a": "cell"}, "up", float)
    arrived: list[str] = []
    sender = scheduler.add_sender("a")
    for _ in range(30):
        scheduler.put(sender, lambda: arrived.append("measured"), 1448, now=0.0)
    for _ in range(3):
        scheduler.put("a", lambda: arrived.append("device"), 1448, now=0.0)
    scheduler.remove_sender(sender)
    for item in scheduler.pop_due(5.0):
        item()
    assert arrived.count("device") == 3
    assert arrived.count("measured") <= 3
    assert scheduler.next_due() is None
    assert not scheduler.is_full("a")


def test_only_the_named_segments_are_measured() -> None:
    shared = SharedSegments([Segment("a", up=CELL), Segment("b", up=CELL)], {"x": "a", "y": "b"}, 1, 1.0)
    (found,) = asyncio.run(shared.measure(["b", "c"])).segments
    assert (found.segment, found.way, found.full) == ("b", "up", CELL)


@pytest.mark.timed
@pytest.mark.parametrize("is_cut", [False, True], ids=["slow", "disconnected"])
def test_slow_or_disconnected_device_does_not_block_its_cell(
    is_cut: bool, relay: Relay, through: Through, of: Of
) -> None:
    shared = SharedSegments([Segment("wifi", up=CELL)], dict.fromkeys("ab", "wifi"), 1, 1.0)
    own = of(AccessLink(up=None if is_cut else 10**5))
    away, there = through(own, *_lanes(shared, "a"))(), through(of(AccessLink()), *_lanes(shared, "b"))()
    if is_cut:
        relay.submit(partial(own.apply, Disconnect()))
        time.sleep(0.05)
    threading.Thread(target=sent, args=(away[0], bytes(500_000)), daemon=True).start()
    time.sleep(0.5)  # its queue is full
    begin = time.monotonic()
    sent(there[0], bytes(100_000))
    assert len(received(there[1])) == 100_000
    # 0.209 s, and what the slow one had before or takes meanwhile: 2.5 % of the rate.
    assert time.monotonic() - begin == pytest.approx(0.21, abs=0.05)
    relay.submit(partial(own.apply, Reconnect() if is_cut else SetLink({"up": None})))
    assert len(received(away[1])) == 500_000


def test_probe_transfer_lasts_a_second_within_byte_bounds() -> None:
    assert relay_process.probe_size(2_000_000) == 250_000
    assert relay_process.probe_size(64_000) == 12_000
    assert relay_process.probe_size(1_000_000_000) == 4_000_000


@pytest.mark.timed
def test_transfers_measure_the_rate_in_each_direction() -> None:
    """They use the loopback interface, which is faster than any link."""
    with relay_process.probe_server(HOST) as port:
        for move in (relay_process.upload_probe, relay_process.download_probe):
            assert move(HOST, port, 100_000_000) > 100_000_000


@pytest.mark.timed
def test_late_reader_measures_the_time_of_arrival() -> None:
    """Four parts of the data arrive 0.1 s apart. The reader begins after the second has arrived."""
    part = 10_000
    with socket.create_server((HOST, 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        packets.enable_timestamps(receiver)

        sent = []

        def send() -> None:
            for _ in range(4):
                sent.append(time.monotonic())
                sender.sendall(bytes(part))
                time.sleep(0.1)

        with sender, receiver:
            threading.Thread(target=send).start()
            time.sleep(0.15)
            count, seconds = relay_process.receive_timed(receiver, 4 * part)
        assert count == 2 * part
        assert seconds == pytest.approx(sent[3] - sent[1], abs=0.02)


@pytest.mark.parametrize("move", [relay_process.upload_probe, relay_process.download_probe])
def test_link_lost_during_a_transfer_gives_no_rate(
    move: Callable[[str, int, int], float],
) -> None:
    with socket.create_server((HOST, 0)) as gone:

        def give_up() -> None:
            with gone.accept()[0] as sock:
                if sock.recv(1 << 16).startswith(b"down"):
                    sock.sendall(bytes(10))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass

        threading.Thread(target=give_up, daemon=True).start()
        with pytest.raises(ConnectionError):
            move(HOST, gone.getsockname()[1], 64_000)


def test_error_of_a_change_in_the_relays_thread_is_reported() -> None:
    relay, told = Relay(), list[str]()

    def change() -> None:
        raise OverflowError("too large")

    async def work() -> None:
        raise ValueError("no rate")

    relay.report_errors(told.append)
    thread = threading.Thread(target=relay.serve, daemon=True)
    thread.start()
    relay.submit(change)
    relay.start(work())
    eventually(lambda: len(told) == 2)
    assert sorted(told) == ["OverflowError: too large", "ValueError: no rate"]
