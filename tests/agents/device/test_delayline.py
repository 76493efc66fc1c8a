"""The delay line: its decisions by literal numbers, and real packets between two network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.device.delayline import DelayLine, Impairment, QueueTally
from tests.namespaces import Holder, inside, joined

SEED = 5


def _never() -> float:
    raise AssertionError("nothing random was asked for")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"delay": -1.0}, "delay is -1 s, expected at least 0 s"),
        ({"delay": float("inf")}, "delay is inf s"),
        ({"jitter": float("nan")}, "jitter is nan s"),
        ({"loss": 1.5}, "loss is 1.5, expected 0 to 1"),
    ],
)
def test_unfit_impairments_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Impairment(**values)


def test_a_packet_is_due_after_the_delay() -> None:
    line = DelayLine({1: [Impairment(delay=0.5)]}, _never)
    assert line.next_due() is None
    assert line.arrive(1, packet=10, now=100.0)
    assert line.arrive(1, packet=11, now=100.25)
    assert line.next_due() == 100.5
    assert line.due(100.25) == []
    assert line.due(100.5) == [(1, 10)]
    assert line.next_due() == 100.75
    assert line.due(102.0) == [(1, 11)]
    assert line.next_due() is None
    assert line.tally(1) == QueueTally(
        arrived=2, dropped=0, accepted=2, held_total=2.25, late_total=1.25, late_max=1.25
    )


def test_one_answer_per_queue_covers_all_that_is_due() -> None:
    line = DelayLine(
        {1: [Impairment(delay=0.5)], 2: [Impairment(delay=0.25)], 3: [Impairment()]}, _never
    )
    for packet in (1, 2, 3):
        for queue in (1, 2, 3):
            line.arrive(queue, packet, now=float(packet))
    assert line.due(2.5) == [(3, 2), (2, 2), (1, 2)]
    assert line.due(3.0) == [(3, 3)]
    assert line.due(4.0) == [(2, 3), (1, 3)]


def test_packets_due_soon_may_be_accepted_early() -> None:
    line = DelayLine({1: [Impairment(delay=0.5)]}, _never)
    line.arrive(1, packet=1, now=0.0)
    assert line.due(0.25, early=0.125) == []
    assert line.due(0.25, early=0.25) == [(1, 1)]
    assert line.tally(1) == QueueTally(1, 0, 1, held_total=0.25, late_total=-0.25, late_max=0.0)


def test_jitter_is_uniform_around_the_delay_and_never_overtakes() -> None:
    draws = iter([0.0, 0.5, 0.75, 0.25])
    line = DelayLine({1: [Impairment(delay=1.0, jitter=0.5)]}, draws.__next__)
    due = []
    for packet, now in enumerate([0.0, 10.0, 20.0, 20.125]):
        line.arrive(1, packet, now)
        due.append(line.next_due())
        if packet < 2:
            line.due(now + 5)
    assert due == [0.5, 11.0, 21.25, 21.25]
    assert line.due(20.875 + 0.25) == []  # the last would have been due at 20.875
    assert line.due(21.25) == [(1, 3)]


def test_impairments_of_a_path_add_up() -> None:
    """A packet may be lost on each part of its way, and each part draws its own jitter."""
    draws = iter([0.9, 0.0, 1.0, 0.1])
    parts = [Impairment(delay=0.25, jitter=0.125, loss=0.5), Impairment(delay=1.0, jitter=0.5)]
    line = DelayLine({1: parts}, draws.__next__)
    assert line.arrive(1, 1, now=0.0)
    assert line.next_due() == (0.25 - 0.125) + (1.0 + 0.5)
    assert not line.arrive(1, 2, now=0.0)


def test_a_delay_is_never_negative() -> None:
    line = DelayLine({1: [Impairment(delay=0.25, jitter=1.0)]}, lambda: 0.0)
    line.arrive(1, 1, now=3.0)
    assert line.due(3.0) == [(1, 1)]


def test_a_change_applies_to_packets_that_arrive_later() -> None:
    line = DelayLine({1: [Impairment(delay=1.0)]}, lambda: 0.999)
    line.arrive(1, 1, now=0.0)
    line.change(1, [Impairment(delay=0.25)])
    line.arrive(1, 2, now=0.5)  # due 0.75 by itself, but not before the first
    line.change(1, [Impairment(loss=1.0)])
    assert not line.arrive(1, 3, now=0.625)
    assert line.due(0.875) == []
    assert line.due(1.0) == [(1, 2)]
    line.change(1, [Impairment(delay=0.25)])
    line.arrive(1, 4, now=2.0)
    assert line.next_due() == 2.25
    assert line.tally(1) == QueueTally(arrived=4, dropped=1, accepted=2, held_total=1.5)


changes = st.tuples(
    st.floats(0, 1),
    st.integers(1, 3),
    st.builds(Impairment, st.floats(0, 2), st.floats(0, 2), st.sampled_from([0.0, 0.0, 0.3, 1.0])),
)


@given(st.lists(changes, max_size=60), st.integers(0, 99))
def test_order_is_kept_and_each_packet_is_due_in_time(
    script: list[tuple[float, int, Impairment]], seed: int
) -> None:
    line = DelayLine({key: [Impairment()] for key in (1, 2, 3)}, np.random.default_rng(seed).random)
    held: dict[int, deque[tuple[int, float, float]]] = {queue: deque() for queue in (1, 2, 3)}
    latest = dict.fromkeys((1, 2, 3), 0.0)

    def release(until: float) -> None:
        while (at := line.next_due()) is not None and at <= until:
            for queue, last in line.due(at):
                packet = None
                while packet != last:  # an IndexError here: a packet that is not held
                    packet, arrival, bound = held[queue].popleft()
                    assert arrival <= at <= bound

    now = 0.0
    for packet, (pause, queue, impairment) in enumerate(script):
        now += pause
        release(now)
        line.change(queue, [impairment])
        if line.arrive(queue, packet, now):
            latest[queue] = max(latest[queue], now + impairment.delay + impairment.jitter)
            held[queue].append((packet, now, latest[queue]))
    release(max(latest.values()))
    assert not any(held.values())
    assert sum(line.tally(queue).arrived for queue in (1, 2, 3)) == len(script)


SERVE = """
import json, sys, threading
from dataclasses import asdict
import numpy as np
from agents.device.delayline import DelayServer, Impairment

impairment = Impairment(*json.loads(sys.argv[1]))
server = DelayServer({5: [impairment]}, np.random.default_rng(int(sys.argv[2])).random)
serving = threading.Thread(target=server.serve)
serving.start()
print("serving", flush=True)
for line in sys.stdin:
    server.change(5, [Impairment(*json.loads(line))])
    print("changed", flush=True)
server.stop()
serving.join()
server.close()
print(json.dumps(asdict(server.tally(5))))
"""

PING = """
import contextlib, json, os, select, socket, struct, sys, time

target, count, interval = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with contextlib.suppress(PermissionError):  # how late this process is must not count
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
icmp = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
sent, took = {}, {}
start = time.monotonic()
end = start + count * interval + 0.5
while len(took) < count and (now := time.monotonic()) < end:
    due = start + len(sent) * interval if len(sent) < count else end
    if now >= due:
        number = len(sent)
        checksum = ~(0x0800 + number) & 0xFFFF
        sent[number] = time.monotonic()
        icmp.sendto(struct.pack("!BBHHH", 8, 0, checksum, 0, number), (target, 0))
    elif select.select([icmp], [], [], min(due - now, 0.01))[0]:
        kind, _, _, _, number = struct.unpack_from("!BBHHH", icmp.recv(256), 20)
        if kind == 0:
            took[number] = time.monotonic() - sent[number]
print(json.dumps([took.get(number) for number in range(count)]))
"""

RECEIVE = """
import socket, sys, time

listening = socket.create_server(("10.213.0.2", 9000))
print("listening", flush=True)
connections = [listening.accept()[0] for _ in range(int(sys.argv[1]))]
print("connected", flush=True)
connections[0].recv(1)
started = time.monotonic()
for connection in connections:
    while connection.recv(1 << 18):
        pass
print(time.monotonic() - started)
"""

SEND = """
import socket, sys
sock = socket.create_connection(("10.213.0.2", 9000))
sys.stdin.readline()
sock.sendall(bytes(int(sys.argv[1])))
"""


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    holder: Holder
    stack: ExitStack

    def command(self, *command: str) -> list[str]:
        return [*inside(self.holder), *command]

    def run(self, *command: str) -> str:
        result = subprocess.run(self.command(*command), capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def start(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        command = self.command(sys.executable, "-c", code, *arguments)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.stack.enter_context(process)
        self.stack.callback(process.kill)
        return process

    def ping(self, target: str, count: int, interval: float) -> list[float | None]:
        """Round-trip times in seconds, None where no answer came."""
        times: list[float | None] = json.loads(
            self.run(sys.executable, "-c", PING, target, str(count), str(interval))
        )
        return times

    def serve(self, impairment: list[float]) -> Served:
        served = Served(self.start(SERVE, json.dumps(impairment), str(SEED)))
        assert served.said() == "serving"
        return served


@dataclass(frozen=True)
class Served:
    """A running delay line."""

    process: subprocess.Popen[str]

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def change(self, impairment: list[float]) -> None:
        assert self.process.stdin is not None
        print(json.dumps(impairment), file=self.process.stdin, flush=True)
        assert self.said() == "changed"

    def end(self) -> QueueTally:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return QueueTally(**json.loads(self.said()))


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """A device, 10.213.0.2, and a broker, 10.213.0.1, that send what they receive to queue 5."""
    with ExitStack() as stack:
        device, broker = (Host(holder, stack) for holder in joined(stack, "iptables"))
        for host in (device, broker):
            host.run(*_HOLD.split())
        yield device, broker


_HOLD = "iptables -t raw -A PREROUTING -i eth0 -j NFQUEUE --queue-num 5"


def _all(times: list[float | None]) -> list[float]:
    """Sorted; every ping was answered."""
    answered = sorted(time for time in times if time is not None)
    assert len(answered) == len(times)
    return answered


@pytest.mark.timed
@pytest.mark.parametrize("delay", [0.050, 0.005])
def test_the_round_trip_is_the_sum_of_the_delays(hosts: tuple[Host, Host], delay: float) -> None:
    broker = hosts[1]
    lines = [host.serve([delay]) for host in hosts]
    times = _all(broker.ping("10.213.0.2", count=50, interval=0.013))
    # A busy host may add, never take; each line may be half a millisecond early.
    assert 2 * delay - 0.001 < times[0] < times[12] < 2 * delay + max(0.001, 0.02 * 2 * delay)
    for tally in (line.end() for line in lines):
        assert tally.accepted == 50
        assert tally.held_total / 50 > delay - 0.0005


@pytest.mark.timed
def test_packets_get_the_jitter_drawn_for_them(hosts: tuple[Host, Host]) -> None:
    device, broker = hosts
    device.serve([0.020, 0.005])
    broker.serve([0.0])
    times = broker.ping("10.213.0.2", count=100, interval=0.015)
    _all(times)
    uniform = np.random.default_rng(SEED).random
    drawn = [0.020 + 0.005 * (2 * uniform() - 1) for _ in range(100)]
    excess = sorted(time - asked for time, asked in zip(times, drawn, strict=True) if time is not None)
    assert -0.001 < excess[0] < excess[50] < 0.001


@pytest.mark.timed
def test_exactly_the_drawn_packets_are_lost(hosts: tuple[Host, Host]) -> None:
    device, broker = hosts
    line = device.serve([0.010, 0.0, 0.1])
    broker.serve([0.0])
    times = broker.ping("10.213.0.2", count=500, interval=0.002)
    uniform = np.random.default_rng(SEED).random
    assert [time is None for time in times] == [uniform() < 0.1 for _ in range(500)]
    lost = line.end().dropped
    assert abs(lost - 50) < 5 * 6.7  # standard deviation √(500 · 0.1 · 0.9) = 6.7


@pytest.mark.timed
def test_impairments_change_during_a_run(hosts: tuple[Host, Host]) -> None:
    device, broker = hosts
    line = device.serve([0.020])
    broker.serve([0.0])

    def ping() -> list[float | None]:
        return broker.ping("10.213.0.2", count=10, interval=0.005)

    assert 0.0195 < _all(ping())[0] < 0.022
    line.change([0.080])
    assert 0.0795 < _all(ping())[0] < 0.082
    line.change([0.0, 0.0, 1.0])
    assert ping() == [None] * 10
    line.change([0.020])
    assert 0.0195 < _all(ping())[0] < 0.022
    tally = line.end()
    assert (tally.arrived, tally.dropped, tally.accepted) == (40, 10, 30)


@pytest.mark.timed
def test_nothing_passes_once_the_delay_line_is_dead(hosts: tuple[Host, Host]) -> None:
    device, broker = hosts
    line = device.serve([0.0])
    broker.serve([0.0])
    _all(broker.ping("10.213.0.2", count=3, interval=0.005))
    line.process.kill()
    line.process.wait()
    assert broker.ping("10.213.0.2", count=3, interval=0.005) == [None] * 3


def _seconds(device: Host, broker: Host, sizes: list[int]) -> float:
    """Seconds in which the broker sends the device these bytes, over one connection each, at once."""
    receiving = device.start(RECEIVE, str(len(sizes)))
    assert receiving.stdout is not None
    assert receiving.stdout.readline() == "listening\n"
    senders = [broker.start(SEND, str(size)) for size in sizes]
    assert receiving.stdout.readline() == "connected\n"
    for sender in senders:
        assert sender.stdin is not None
        sender.stdin.close()
    return float(receiving.stdout.readline())


@pytest.mark.timed
@pytest.mark.parametrize("loss", [0.0, 1e-9])
def test_a_line_with_a_long_delay_holds_thousands_of_packets(
    hosts: tuple[Host, Host], loss: float
) -> None:
    """With loss, merged packets are split before they are held: 20,000 instead of a few hundred."""
    device, broker = hosts
    line = device.serve([0.050, 0.0, loss])
    broker.serve([0.0])
    seconds = _seconds(device, broker, [30_000_000])
    assert 8 * 30 / seconds > 50  # Mbit/s
    assert (line.end().arrived > 15_000) == (loss > 0)
