"""The client of the kernel's packet queues: what it reads, and what the kernel does at its word."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
import sys
import textwrap

import pytest

from agents.device.delayline import Notice, PacketQueues, QueueError, parse
from tests.conftest import unavailable

PACKET, ERROR = 0x0300, 2


def _message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def _packet(queue: int, packet: int, before: bytes = b"", after: bytes = b"") -> bytes:
    """A packet's notice; `before` its packet header there may be other attributes, and `after` it."""
    header = struct.pack("=HH", 11, 1) + struct.pack(">IHB", packet, 0x0800, 0) + b"\0"
    mark = struct.pack("=HHI", 8, 3, 42)
    return _message(PACKET, struct.pack(">BBH", 2, 0, queue) + before + header + mark + after)


def _error(code: int) -> bytes:
    return _message(ERROR, struct.pack("=i", -code) + bytes(16))


@pytest.mark.parametrize(
    ("data", "packets"),
    [
        (b"", []),
        (_packet(7, 1), [(7, 1)]),
        (_packet(0xFFFE, 0x01020304), [(0xFFFE, 0x01020304)]),
        (_packet(7, 2, before=struct.pack("=HHI", 8, 3, 1)), [(7, 2)]),
        (_packet(7, 2, before=struct.pack("=HHBxxx", 5, 3, 1)), [(7, 2)]),  # padded to four bytes
        (_packet(7, 3) + _packet(8, 1) + _packet(7, 4), [(7, 3), (8, 1), (7, 4)]),
        (_packet(7, 3) + _error(errno.ENOENT) + _packet(7, 4), [(7, 3), (7, 4)]),
        (_error(0), []),
        (_message(PACKET, struct.pack(">BBH", 2, 0, 7)), []),
        (_message(3, b""), []),
    ],
)
def test_netlink_messages_are_parsed(data: bytes, packets: list[Notice]) -> None:
    assert parse(data) == packets


def test_an_error_of_the_kernel_is_raised() -> None:
    with pytest.raises(QueueError, match="refused a verdict or a setting: Operation not permitted"):
        parse(_packet(7, 3) + _error(errno.EPERM))


def test_a_queue_number_has_16_bits() -> None:
    queues = PacketQueues()
    with pytest.raises(ValueError, match="queue number is 65536"):
        queues.bind(65536, 10, merged=True)
    queues.close()


SETUP = """
    import os, select, socket, subprocess
    from agents.device.delayline import PacketQueues, QueueError, QueueState

    subprocess.run("ip link set lo up".split(), check=True)
    rule = "iptables -t raw -A PREROUTING -i lo -p udp -j NFQUEUE --queue-num 7"
    subprocess.run(rule.split(), check=True)
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind(("127.0.0.1", 9000))
    receiver.settimeout(120)
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.connect(("127.0.0.1", 9000))
    queues = PacketQueues()

    def error(of):
        try:
            of()
        except QueueError as error:
            return str(error)
        raise AssertionError("no error")

    def nothing_comes():
        return not select.select([receiver], [], [], 0.05)[0]
"""


def _run(code: str) -> None:
    """Run SETUP and `code` in a network namespace of their own."""
    if os.geteuid() != 0 or shutil.which("iptables") is None or shutil.which("unshare") is None:
        unavailable("netns", "queues take root, iptables and unshare of util-linux")
    program = textwrap.dedent(SETUP) + textwrap.dedent(code)
    command = ["unshare", "--net", sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr


def test_packets_wait_for_their_verdict() -> None:
    _run("""
        queues.bind(7, 100, merged=True)
        for n in range(5):
            sender.send(b"%d" % n)
        packets = queues.receive()
        assert packets == [(7, n) for n in range(1, 6)], packets
        assert queues.state() == {7: QueueState(held=5, overrun=0)}
        assert nothing_comes()
        queues.drop([(7, 2)])
        queues.accept([(7, 4)])
        assert [receiver.recv(10) for _ in range(3)] == [b"0", b"2", b"3"]
        assert queues.receive() == []
        assert queues.state() == {7: QueueState(held=1, overrun=0)}
        queues.accept([(7, 1)])  # gone already: no error
        assert queues.receive() == []
        assert nothing_comes()
    """)


def test_at_most_the_requested_number_is_received_at_once() -> None:
    _run("""
        queues.bind(7, 100, merged=True)
        for _ in range(5):
            sender.send(b"")
        assert [len(queues.receive(limit=2)) for _ in range(4)] == [2, 2, 1, 0]
    """)


def test_held_packets_are_lost_with_the_socket_and_none_pass_without_one() -> None:
    _run("""
        sender.send(b"before")
        queues.bind(7, 100, merged=True)
        sender.send(b"held")
        queues.close()
        sender.send(b"after")
        assert nothing_comes()
    """)


def test_overruns_are_counted() -> None:
    _run("""
        queues.bind(7, 2, merged=True)
        for _ in range(5):
            sender.send(b"")
        assert queues.state() == {7: QueueState(held=2, overrun=3)}
        assert len(queues.receive()) == 2
    """)


def test_merged_packets_are_kept_whole_or_truncated() -> None:
    _run("""
        UDP_SEGMENT = 103
        sender.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, 1000)
        queues.bind(7, 100, merged=True)
        counts = []
        for merged in (True, False, True):
            queues.set_merged(7, merged=merged)
            sender.send(bytes(3000))
            counts.append(len(queues.receive()))
        assert counts == [1, 3, 1], counts
        queues.accept([(7, 5)])
        assert sum(len(receiver.recv(5000)) for _ in range(9)) == 9000
    """)


def test_packets_arriving_while_a_queue_is_bound_are_not_lost() -> None:
    _run("""
        queues.bind(7, 100, merged=True)
        sender.send(b"")
        queues.bind(8, 100, merged=True)
        sender.send(b"")
        assert queues.receive() + queues.receive() == [(7, 1), (7, 2)]
        assert sorted(queues.state()) == [7, 8]
    """)


def test_kernel_refusals_are_reported() -> None:
    _run("""
        queues.bind(7, 100, merged=True)
        port = queues._socket.getsockname()[0]
        other = PacketQueues()
        said = error(lambda: other.bind(7, 100, merged=True))
        assert said == f"queue 7 is used by another process (netlink port {port})", said
        assert error(lambda: queues.bind(7, 100, merged=True)) == "queue 7 is already bound"
        other.set_merged(7, merged=True)
        assert "refused a verdict or a setting" in error(other.receive)
        os.seteuid(65534)
        said = error(lambda: other.bind(8, 100, merged=True))
        assert said == "queue 8: no CAP_NET_ADMIN in this network namespace", said
    """)
