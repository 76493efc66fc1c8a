"""The access link: the commands, and what the kernel makes of them in a network namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from agents.config import Link
from agents.device import link
from tests.conftest import unavailable

GOLDEN = """\
tc qdisc replace dev eth0 root tbf rate 2000000bit burst 1514 limit 50000
ip link add ifb0 type ifb
ip link set ifb0 up
tc qdisc add dev eth0 handle ffff: ingress
tc filter add dev eth0 parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev ifb0
tc qdisc replace dev ifb0 root tbf rate 20000000bit burst 5000 limit 500000
"""


def test_commands() -> None:
    both = link.commands(Link(up=2_000_000, down=20_000_000), "eth0")
    assert "".join(" ".join(command) + "\n" for command in both) == GOLDEN
    assert link.commands(Link(up=2_000_000), "eth0") == both[:1]
    assert link.commands(Link(down=20_000_000), "eth0") == both[1:]
    assert link.commands(Link(), "eth0") == []


@pytest.mark.parametrize(
    ("rate", "size"),
    [
        (200_000, 1514),  # one full packet, Ethernet header included
        (2_000_000, 1514),
        (20_000_000, 5000),  # 2 ms
        (1_000_000_000, 250_000),
    ],
)
def test_burst(rate: int, size: int) -> None:
    assert link.burst(rate) == size


@dataclass(frozen=True)
class Namespace:
    """A device's network namespace, 10.213.0.2, joined by a veth pair to a broker's, 10.213.0.1."""

    device: str
    broker: str

    def python(self, code: str) -> None:
        """Run `code` in the device's namespace."""
        command = ["ip", "netns", "exec", self.device, sys.executable, "-c", code]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr

    def apply(self, wanted: Link) -> None:
        self.python(
            "from agents.config import Link\n"
            "from agents.device import link\n"
            f"link.apply({wanted!r}, link.interface_towards('10.213.0.1'))"
        )

    def transfer(self, sender: str, receiver: str, size: int) -> float:
        """Seconds that `size` bytes over one TCP connection from `sender` to `receiver` take."""
        address = "10.213.0.1" if receiver == self.broker else "10.213.0.2"
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
        with subprocess.Popen(
            ["ip", "netns", "exec", receiver, sys.executable, "-c", receive],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == "listening\n"
                subprocess.run(["ip", "netns", "exec", sender, sys.executable, "-c", send], check=True)
                return float(process.stdout.readline())
            finally:
                process.kill()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    if os.geteuid() != 0 or shutil.which("tc") is None or shutil.which("ip") is None:
        unavailable("netns", "shaping a link takes root, and ip and tc of iproute2")
    unique = uuid.uuid4().hex[:8]
    namespace = Namespace(f"device-{unique}", f"broker-{unique}")
    ends = {namespace.device: "10.213.0.2/24", namespace.broker: "10.213.0.1/24"}
    try:
        for name in ends:
            _ip("netns", "add", name)
        _ip(
            *("link", "add", "eth0", "netns", namespace.device, "type", "veth"),
            *("peer", "name", "eth0", "netns", namespace.broker),
        )
        try:
            _ip("-n", namespace.device, "link", "add", "probe", "type", "ifb")
        except subprocess.CalledProcessError as error:
            unavailable("netns", f"the kernel has no ifb: {error.stderr.decode().strip()}")
        for name, address in ends.items():
            _ip("-n", name, "address", "add", address, "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield namespace
    finally:
        for name in ends:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_the_link_holds_in_both_directions(namespace: Namespace) -> None:
    namespace.apply(Link(up=2_000_000, down=10_000_000))
    up = namespace.transfer(namespace.device, namespace.broker, 250_000)
    down = namespace.transfer(namespace.broker, namespace.device, 1_250_000)
    # 1 s of payload each; headers add 5 %. A busy host may add, never take.
    assert 0.95 < up < 1.5
    assert 0.95 < down < 1.5


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_small_model_does_not_slip_through_the_burst(namespace: Namespace, direction: str) -> None:
    """128 KiB at 2 Mbit/s is 0.52 s of payload."""
    namespace.apply(Link(up=2_000_000, down=2_000_000))
    ends = (namespace.device, namespace.broker)
    sender, receiver = ends if direction == "up" else ends[::-1]
    assert namespace.transfer(sender, receiver, 128 * 1024) > 0.51


def test_what_the_kernel_refuses_is_said(namespace: Namespace) -> None:
    namespace.python(
        "from agents.config import Link\n"
        "from agents.device import link\n"
        "try:\n"
        "    link.apply(Link(up=1_000_000), 'eth7')\n"
        "except link.LinkError as error:\n"
        "    assert 'eth7' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('no error')"
    )


def test_a_rate_that_is_not_as_asked_is_an_error(namespace: Namespace) -> None:
    namespace.python(
        "from agents.config import Link\n"
        "from agents.device import link\n"
        "link._tbf = lambda rate, made=link._tbf: made(rate + 8000)\n"
        "try:\n"
        "    link.apply(Link(up=1_000_000), 'eth0')\n"
        "except link.LinkError as error:\n"
        "    assert 'asked for 1000000 bit/s on eth0, the kernel has 1008000' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('no error')"
    )
