"""The access link: the commands, and what the kernel makes of them in a network namespace of its own."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from numpy.typing import NDArray

from agents.config import AccessLink
from agents.device import link
from tests.conftest import unavailable
from tests.namespaces import inside, joined

TBF = """\
tc qdisc replace dev eth0 root handle 1: tbf rate 2000000bit burst 1514 limit 50000 \
peakrate 200000000000bit mtu 1514
ip link add ifb0 type ifb
ip link set ifb0 up
tc qdisc add dev eth0 handle ffff: ingress
tc filter add dev eth0 parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev ifb0
tc qdisc replace dev ifb0 root handle 1: tbf rate 20000000bit burst 5000 limit 500000 \
peakrate 200000000000bit mtu 1514
"""
NETEM = """\
tc qdisc replace dev eth0 root handle 1: tbf rate 2000000bit burst 1514 limit 50000 \
peakrate 200000000000bit mtu 1514
tc qdisc replace dev eth0 parent 1:1 handle 10: netem limit 10000000 delay 40000us 5000us loss \
1.000000% rate 100000000000bit
tc qdisc replace dev eth0 parent 10:1 handle 100: bfifo limit 50000
ip link add ifb0 type ifb
ip link set ifb0 up
tc qdisc add dev eth0 handle ffff: ingress
tc filter add dev eth0 parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev ifb0
tc qdisc replace dev ifb0 root handle 1: tbf rate 100000000000bit burst 25000000 limit 2500000000 \
peakrate 200000000000bit mtu 1514
tc qdisc replace dev ifb0 parent 1:1 handle 10: netem limit 10000000 delay 40000us 5000us loss \
1.000000% rate 100000000000bit
tc qdisc replace dev ifb0 parent 10:1 handle 100: bfifo limit 2500000000
"""


def test_tc_commands_of_a_link() -> None:
    both = link.commands(AccessLink(up=2_000_000, down=20_000_000), "eth0")
    assert "".join(" ".join(command) + "\n" for command in both) == TBF
    assert link.commands(AccessLink(up=2_000_000), "eth0") == both[:1]
    assert link.commands(AccessLink(down=20_000_000), "eth0") == both[1:]
    assert link.commands(AccessLink(), "eth0") == []


def test_change_only_runs_the_commands_it_needs() -> None:
    before = AccessLink(up=2_000_000, down=20_000_000)
    slower = "tbf rate 1000000bit burst 1514 limit 25000 peakrate 200000000000bit mtu 1514"
    (changed,) = link.commands(AccessLink(up=1_000_000, down=20_000_000), "eth0", before)
    assert " ".join(changed) == f"tc qdisc replace dev eth0 root handle 1: {slower}"
    (changed,) = link.commands(AccessLink(up=2_000_000, down=1_000_000), "eth0", before)
    assert " ".join(changed) == f"tc qdisc replace dev ifb0 root handle 1: {slower}"


def test_netem_commands_of_a_link() -> None:
    """A rate that is not asked is lifted, so that each way has a tbf for netem to be the child of."""
    asked = AccessLink(up=2_000_000, rtt=0.080, jitter=0.005, loss=0.01)
    made = link.commands(asked, "eth0", netem=True)
    assert "".join(" ".join(command) + "\n" for command in made) == NETEM


def test_change_with_netem_only_runs_the_commands_it_needs() -> None:
    before = AccessLink(up=2_000_000)
    delays = link.commands(AccessLink(up=2_000_000, rtt=0.080), "eth0", before, netem=True)
    assert [command[4:10:5] for command in delays] == [["eth0", "netem"], ["ifb0", "netem"]]
    rates = link.commands(AccessLink(up=1_000_000), "eth0", before, netem=True)
    assert [command[4] for command in rates] == ["eth0", "eth0"]
    assert link.commands(before, "eth0", before, netem=True) == []


def test_jitter_that_netem_cannot_make_is_refused() -> None:
    with pytest.raises(
        link.LinkError, match=r"jitter is 3 s, but netem supports only values below 2\.1 s"
    ):
        link.commands(AccessLink(rtt=8.0, jitter=3.0), "eth0", netem=True)


@pytest.mark.parametrize(
    ("rate", "size"),
    [
        (200_000, 1514),  # one full packet, Ethernet header included
        (2_000_000, 1514),
        (20_000_000, 5000),  # 2 ms
        (1_000_000_000, 250_000),
    ],
)
def test_bucket_size_by_rate(rate: int, size: int) -> None:
    assert link.burst(rate) == size


@dataclass(frozen=True)
class Network:
    """A device's network namespace, 10.213.0.2, joined by a veth pair to a broker's, 10.213.0.1."""

    device: subprocess.Popen[str]
    broker: subprocess.Popen[str]

    def python(self, code: str) -> None:
        """Run `code` on the device."""
        command = [*inside(self.device), sys.executable, "-c", code]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr

    def apply(self, wanted: AccessLink) -> None:
        self.python(
            "from agents.config import AccessLink\n"
            "from agents.device import link\n"
            f"link.apply({wanted!r}, link.interface_towards('10.213.0.1'))"
        )

    def upload(self, size: int) -> float:
        """Seconds that `size` bytes over one TCP connection take from the device to the broker."""
        return _transfer(self.device, self.broker, "10.213.0.1", size)

    def download(self, size: int) -> float:
        return _transfer(self.broker, self.device, "10.213.0.2", size)


def _transfer(
    sender: subprocess.Popen[str], receiver: subprocess.Popen[str], address: str, size: int
) -> float:
    receive = (
        "import socket, time\n"
        f"listening = socket.create_server(('{address}', 9000))\n"
        "print('listening', flush=True)\n"
        "connection, _ = listening.accept()\n"
        "started = time.monotonic()\n"
        "while connection.recv(1 << 16): pass\n"
        "print(time.monotonic() - started)"
    )
    send = f"import socket; socket.create_connection(('{address}', 9000)).sendall(bytes({size}))"
    command = [*inside(receiver), sys.executable, "-c", receive]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "listening\n"
            subprocess.run([*inside(sender), sys.executable, "-c", send], check=True)
            return float(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture
def network() -> Iterator[Network]:
    with ExitStack() as stack:
        network = Network(*joined(stack, "tc"))
        probe = [*inside(network.device), "ip", "link", "add", "probe", "type", "ifb"]
        if subprocess.run(probe, check=False, capture_output=True).returncode:
            unavailable("netns", "the kernel has no ifb")
        yield network


@pytest.mark.timed
@pytest.mark.parametrize(("rate", "size"), [(2_000_000, 128 * 1024), (10_000_000, 1_250_000)])
def test_link_limits_both_directions(network: Network, rate: int, size: int) -> None:
    """A small model, too, despite the bucket. Headers add 5 %; a busy host may add, never take."""
    network.apply(AccessLink(up=rate, down=rate))
    payload = 8 * size / rate
    for seconds in (network.upload(size), network.download(size)):
        assert 0.97 < seconds / payload < 1.5


WATCH = """
import socket, struct, sys, time
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
sock.setsockopt(socket.SOL_SOCKET, 35, 1)  # SO_TIMESTAMPNS: when the kernel saw it, not we
sock.settimeout(float(sys.argv[1]))
print("watching", flush=True)
frames = []  # printed at the end, as nobody reads them before: a full pipe would make us wait
try:
    while True:
        data, told, _, address = sock.recvmsg(65536, 64)
        if address[2] != socket.PACKET_OUTGOING:
            seconds, rest = struct.unpack("=qq", told[0][2][:16])
            frames.append((seconds + rest / 1e9, len(data)))
except TimeoutError:
    for at, size in frames:
        print(at, size)
"""
"""Time and size in bytes of each frame that comes in, until none comes any more."""

BLAST = """
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
begin = time.monotonic()
sent = 0
while (passed := time.monotonic() - begin) < float(sys.argv[1]):
    while sent < passed * 1000:  # 12 Mbit/s
        sock.sendto(bytes(1472), ("10.213.0.1", 9000))
        sent += 1
    time.sleep(0.002)
"""

SINK = """
import socket
with socket.create_server(("10.213.0.1", 9000)) as listening:
    print("listening", flush=True)
    connection, _ = listening.accept()
    try:
        while connection.recv(1 << 16): pass
    except ConnectionResetError:
        pass
"""

PLAY = """
import itertools, sys, time
from pathlib import Path
from agents.config import AccessLink
from agents.device import link
from agents.timing.nanoseconds import to_seconds
from testbed.topology import link_traces
from testbed.topology.links import LinkTrace

now, interface = AccessLink(), link.interface_towards("10.213.0.1")
begin = time.time()
print(begin, flush=True)
for step in link_traces.steps("device", link_traces.read(LinkTrace(up=sys.argv[1]), Path())):
    at = to_seconds(step.at)
    if at >= float(sys.argv[2]):
        break
    time.sleep(max(0.0, begin + at - time.time()))
    changed = now.with_changes(step.action.changes)
    called = time.time()
    link.apply(changed, interface, now)
    print(changed.up, begin + at, called, time.time(), flush=True)
    now = changed
time.sleep(max(0.0, begin + float(sys.argv[2]) - time.time()))
"""


@contextmanager
def _running(holder: subprocess.Popen[str], code: str, *arguments: str) -> Iterator[IO[str]]:
    """`code` in the namespace of `holder`; what it prints."""
    command = [*inside(holder), sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


def _bytes_by(frames: list[str], begin: float, width: float) -> list[int]:
    """Bytes of each stretch of `width` seconds from `begin` on."""
    found: list[int] = []
    for at, size in (line.split() for line in frames):
        index = int((float(at) - begin) // width)
        if index >= 0:
            found += [0] * (index + 1 - len(found))
            found[index] += int(size)
    return found


PAIRS = """
import socket, sys, time
many = [socket.create_connection((sys.argv[1], 9000)) for _ in range(60)]
size = many[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
for one in many:
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setblocking(False)
print("sending", flush=True)
while True:
    for one in many:
        try: one.send(bytes(2 * size))
        except BlockingIOError: pass
    time.sleep(0.001)
"""
"""Fills the link with pairs of full packets, which the sender hands over as one (GSO)."""

SINKS = """
import selectors, socket, sys
listening, ready = socket.create_server((sys.argv[1], 9000), backlog=100), selectors.DefaultSelector()
ready.register(listening, 1)
print("listening", flush=True)
while True:
    for key, _ in ready.select():
        if key.fileobj is listening: ready.register(listening.accept()[0], 1)
        else: key.fileobj.recv(1 << 16)
"""

MEASURE = """
import sys, time
from agents.config import AccessLink
from agents.device import link
from agents.device.netlink import Netlink
rates, now, interface = list(map(int, sys.argv[1].split(","))), None, "eth0"
usage = None
for rate in rates:
    wanted = AccessLink(up=rate, down=rate)
    link.apply(wanted, interface, now)
    now, usage = wanted, usage or link.LinkUsage(interface, Netlink())
    usage.pause()
    usage.read(now, time.monotonic())
    before, until = usage.uses(), time.monotonic() + float(sys.argv[2])
    while time.monotonic() < until:
        time.sleep(0.05)
        usage.read(now, time.monotonic())
    for way, use in usage.uses().items():
        print(way, rate, use.busy - before[way].busy, use.left - before[way].left,
              use.allowed - before[way].allowed, len(usage.stuck_since()), flush=True)
"""
"""Rates carried in each direction for each requested rate, as the device's init measures them."""


@pytest.mark.timed
def test_queued_packets_are_sent_after_the_rate_falls(network: Network) -> None:
    """At 13.6 Mbit/s a bucket holds two full packets and at 9 Mbit/s one: pairs that wait must not be
    too large for the new bucket."""
    device, broker = network.device, network.broker
    with (
        _running(broker, SINKS, "10.213.0.1") as up,
        _running(device, SINKS, "10.213.0.2") as down,
    ):
        assert (up.readline(), down.readline()) == ("listening\n", "listening\n")
        with (
            _running(device, PAIRS, "10.213.0.1") as sends,
            _running(broker, PAIRS, "10.213.0.2") as receives,
        ):
            assert (sends.readline(), receives.readline()) == ("sending\n", "sending\n")
            with _running(device, MEASURE, "13600000,9000000,13600000,6000000", "1.5") as measured:
                rows = [line.split() for line in measured]
    assert len(rows) == 8
    for name, rate, busy, left, allowed, stuck in rows:
        assert float(busy) > 0.7, (name, rate)
        assert float(left) / float(allowed) == pytest.approx(1, abs=0.05), (name, rate)
        assert stuck == "0"


SILENT = """
import socket, time
from agents.device.netlink import Netlink
netlink = Netlink()
sock = socket.create_connection(("10.213.0.1", 9000))
sock.sendall(b"heard")
time.sleep(1.0)
print(*netlink.connections()[0], flush=True)
input()
sock.sendall(b"not heard")
time.sleep(2.0)
print(*netlink.connections()[0], flush=True)
"""


def test_rate_altered_from_outside_is_a_fault_until_it_is_restored(network: Network) -> None:
    network.python(
        "import subprocess, time\n"
        "from agents.config import AccessLink\n"
        "from agents.device.link import ShapedLink\n"
        "link = ShapedLink('pi', 'eth0', netem=False)\n"
        "def faults():\n"
        "    link.read_queues()\n"
        "    return [*link.lasting_faults(time.monotonic())]\n"
        "def tc(words):\n"
        "    subprocess.run(['tc', 'qdisc', *words.split()], check=True)\n"
        "link.apply(AccessLink(up=333_333, down=8_000_000))\n"
        "assert faults() == [], faults()\n"
        "link.change({'down': None})\n"
        "assert faults() == [], faults()\n"
        "link.change({'down': 8_000_000})\n"
        "tc('change dev eth0 root handle 1: tbf rate 1mbit burst 1514 latency 1s')\n"
        "assert faults() == ['the rate of the uplink of pi was altered from outside'], faults()\n"
        "tc('del dev ifb0 root')\n"
        "assert faults()[1:] == ['the rate of the downlink of pi was altered from outside'], faults()\n"
        "link.change({'up': 2_000_000, 'down': 4_000_000})\n"
        "assert faults() == [], faults()\n"
    )


@pytest.mark.timed
def test_connection_without_acknowledgements_is_detected(network: Network) -> None:
    """The other end goes away in silence: its address is taken from it, while its interface stays."""
    with _running(network.broker, SINK) as sink:
        assert sink.readline() == "listening\n"
        command = [*inside(network.device), sys.executable, "-c", SILENT]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as told:
            assert told.stdout is not None
            assert told.stdin is not None
            assert told.stdout.readline() == "0 0.0\n"
            gone = "ip address del 10.213.0.1/24 dev eth0"
            subprocess.run([*inside(network.broker), *gone.split()], check=True)
            told.stdin.write("\n")
            told.stdin.flush()
            _, unanswered = told.stdout.readline().split()
            assert 1.5 < float(unanswered) < 10
            told.kill()


@pytest.mark.timed
def test_packets_larger_than_the_bucket_are_dropped(network: Network) -> None:
    """For example those of a network with jumbo frames."""
    for holder in (network.device, network.broker):
        subprocess.run([*inside(holder), *["ip", "link", "set", "eth0", "mtu", "9000"]], check=True)
    network.apply(AccessLink(up=8_000_000, down=8_000_000))
    assert 0.45 < network.upload(500_000) < 1.0
    assert 0.45 < network.download(500_000) < 1.0


@pytest.mark.timed
def test_delivered_bytes_follow_a_trace(network: Network, tmp_path: Path) -> None:
    """A line of the trace is an opportunity to deliver 1,500 bytes."""
    per_second = [160, 500, 40, 330]
    opportunities = [
        int(1000 * (second + (k + 1) / count))
        for second, count in enumerate(per_second)
        for k in range(count)
    ]
    trace = tmp_path / "up.trace"
    trace.write_text("".join(f"{at}\n" for at in opportunities))
    with _running(network.broker, WATCH, "1.5") as watch:
        assert watch.readline() == "watching\n"
        with (
            _running(network.device, PLAY, str(trace), str(len(per_second))) as play,
            _running(network.device, BLAST, "60"),
        ):
            begin = float(play.readline())
            changes = np.loadtxt(play)  # until it has been played
        frames = watch.readlines()
    rates, due, called, done = changes.T
    assert np.min(done - called) < 0.05
    got = _bytes_by(frames, begin, 1.0)[: len(per_second)]

    def through(times: NDArray[np.float64], second: int) -> float:
        """Bytes that a link lets through in that second, whose rates change at these times."""
        inside = np.clip([*times, math.inf], begin + second, begin + second + 1)
        return float((rates / 8 * np.diff(inside)).sum())

    # The first second begins when the link does; what waits in the queue at its end is of the next.
    for second in range(1, len(per_second)):
        assert through(due, second) == pytest.approx(1_500 * per_second[second], rel=0.05)
        # A busy host may change the rates some milliseconds late.
        low, high = sorted(through(times, second) for times in (called, done))
        assert 0.9 * low < got[second] < 1.1 * high, (second, got)


@pytest.mark.parametrize(
    ("before", "interface", "told"),
    [
        ("", "eth7", "eth7"),
        (
            "link._tbf = lambda rate, made=link._tbf: made(rate + 8000)",
            "eth0",
            "requested 1000000 bit/s on eth0, but the kernel has 1008000",
        ),
    ],
    ids=["no such interface", "another rate"],
)
def test_link_that_the_kernel_refuses_or_makes_otherwise_is_an_error(
    network: Network, before: str, interface: str, told: str
) -> None:
    network.python(
        "from agents.config import AccessLink\n"
        "from agents.device import link\n"
        f"{before}\n"
        "try:\n"
        f"    link.apply(AccessLink(up=1_000_000), {interface!r})\n"
        "except link.LinkError as error:\n"
        f"    assert {told!r} in str(error), error\n"
        "else:\n"
        "    raise AssertionError('no error')"
    )
