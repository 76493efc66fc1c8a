"""The access link: the commands, and what the kernel makes of them in a network namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
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


def test_a_change_touches_only_what_changes() -> None:
    before = Link(up=2_000_000, down=20_000_000)
    slower = "tbf rate 1000000bit burst 1514 limit 25000"
    (changed,) = link.commands(Link(up=1_000_000, down=20_000_000), "eth0", before)
    assert " ".join(changed) == f"tc qdisc replace dev eth0 root {slower}"
    (changed,) = link.commands(Link(up=2_000_000, down=1_000_000), "eth0", before)
    assert " ".join(changed) == f"tc qdisc replace dev ifb0 root {slower}"


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
class Network:
    """A device's network namespace, 10.213.0.2, joined by a veth pair to a broker's, 10.213.0.1.

    Each is held by a process that ends when its standard input closes: however the test ends, nothing
    is left.
    """

    device: subprocess.Popen[str]
    broker: subprocess.Popen[str]

    def python(self, code: str) -> None:
        """Run `code` on the device."""
        command = [*_inside(self.device), sys.executable, "-c", code]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr

    def apply(self, wanted: Link) -> None:
        self.python(
            "from agents.config import Link\n"
            "from agents.device import link\n"
            f"link.apply({wanted!r}, link.interface_towards('10.213.0.1'))"
        )

    def upload(self, size: int) -> float:
        """Seconds that `size` bytes over one TCP connection take from the device to the broker."""
        return _transfer(self.device, self.broker, "10.213.0.1", size)

    def download(self, size: int) -> float:
        return _transfer(self.broker, self.device, "10.213.0.2", size)


def _inside(holder: subprocess.Popen[str]) -> list[str]:
    return ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]


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
    command = [*_inside(receiver), sys.executable, "-c", receive]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "listening\n"
            subprocess.run([*_inside(sender), sys.executable, "-c", send], check=True)
            return float(process.stdout.readline())
        finally:
            process.kill()


def _holder(stack: ExitStack) -> subprocess.Popen[str]:
    """A process in a new network namespace."""
    command = ["unshare", "--net", "sh", "-c", "echo ready; exec cat"]
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    stack.enter_context(holder)  # closes its input and waits
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline() != "ready\n":
        unavailable("netns", f"no network namespace: {holder.stderr.read().strip()}")
    return holder


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() != 0 or shutil.which("tc") is None or shutil.which("nsenter") is None:
        unavailable("netns", "shaping a link takes root, tc of iproute2 and nsenter of util-linux")
    with ExitStack() as stack:
        network = Network(_holder(stack), _holder(stack))
        device, broker = str(network.device.pid), str(network.broker.pid)
        veth = f"ip link add eth0 netns {device} type veth peer name eth0 netns {broker}"
        subprocess.run(veth.split(), check=True)
        for holder, address in ((network.device, "10.213.0.2/24"), (network.broker, "10.213.0.1/24")):
            for command in (f"ip address add {address} dev eth0", "ip link set eth0 up"):
                subprocess.run([*_inside(holder), *command.split()], check=True)
        probe = [*_inside(network.device), "ip", "link", "add", "probe", "type", "ifb"]
        if subprocess.run(probe, check=False, capture_output=True).returncode:
            unavailable("netns", "the kernel has no ifb")
        yield network


def test_the_link_holds_in_both_directions(network: Network) -> None:
    network.apply(Link(up=2_000_000, down=10_000_000))
    up = network.upload(250_000)
    down = network.download(1_250_000)
    # 1 s of payload each; headers add 5 %. A busy host may add, never take.
    assert 0.95 < up < 1.5
    assert 0.95 < down < 1.5


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_small_model_does_not_slip_through_the_burst(network: Network, direction: str) -> None:
    """128 KiB at 2 Mbit/s is 0.52 s of payload."""
    network.apply(Link(up=2_000_000, down=2_000_000))
    transfer = network.upload if direction == "up" else network.download
    assert 0.51 < transfer(128 * 1024) < 1.0


def test_what_the_kernel_refuses_is_said(network: Network) -> None:
    network.python(
        "from agents.config import Link\n"
        "from agents.device import link\n"
        "try:\n"
        "    link.apply(Link(up=1_000_000), 'eth7')\n"
        "except link.LinkError as error:\n"
        "    assert 'eth7' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('no error')"
    )


def test_a_rate_that_is_not_as_asked_is_an_error(network: Network) -> None:
    network.python(
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
