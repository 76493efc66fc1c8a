"""Which port of a bridge is whose, with interfaces laid out as engines of several versions make them.

Docker up to 27 makes both ends of a veth pair in its own network namespace and moves one: the numbers of
the containers' interfaces differ. Docker 28 makes the end in the container's namespace: it is 2 in each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agents.node.isolation import Endpoint, namespace_id, ports_by_namespace
from tests.conftest import unavailable

SERVER, *DEVICES = "server", "d-1", "d-2"
ADDRESSES = {name: f"10.9.0.{number}" for number, name in enumerate([SERVER, *DEVICES], 1)}
MACS = {name: f"02:42:0a:09:00:0{number}" for number, name in enumerate([SERVER, *DEVICES], 1)}
MOVED = (
    "ip link add port-{name} type veth peer name end-{name}",
    "ip link set end-{name} netns {pid} name eth0",
)
MADE_INSIDE = ("nsenter -t {pid} -n ip link add eth0 type veth peer name port-{name} netns {bridge}",)
LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "Docker 20.10 to 27": dict.fromkeys(ADDRESSES, MOVED),
    "Docker 28": dict.fromkeys(ADDRESSES, MADE_INSIDE),
    "Docker 28, one device": {SERVER: MADE_INSIDE, "d-1": MADE_INSIDE},
    "an upgrade between": {SERVER: MOVED, "d-1": MADE_INSIDE, "d-2": MOVED},
}
RECEIVE = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("", 5999)); s.settimeout({seconds})
print("ready", flush=True)
input()
try: print(s.recvfrom(9)[1][0])
except TimeoutError: print("nothing")
"""
SEND = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(3): s.sendto(b"x", ("{to}", 5999))
"""


class Namespaces:
    """Network namespaces of a bridge and of what is on it, each held by a process."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.pids: dict[str, int] = {}

    def add(self, name: str) -> int:
        holder = self._stack.enter_context(
            subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        self._stack.callback(holder.kill)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            unavailable("netns", "no network namespace can be made")
        self.pids[name] = holder.pid
        return holder.pid

    def popen(self, name: str, *command: str) -> subprocess.Popen[str]:
        inside = ["nsenter", "-t", str(self.pids[name]), "-n", *command]
        pipe = subprocess.PIPE
        return subprocess.Popen(inside, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def run(self, name: str, *command: str) -> str:
        process = self.popen(name, *command)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, f"{command}: {err}"
        return out

    def reaches(self, sender: str, receiver: str, *, seconds: float = 120) -> bool:
        """Whether a datagram of `sender` arrives at `receiver`, within `seconds` of being sent."""
        listening = self.popen(receiver, sys.executable, "-c", RECEIVE.format(seconds=seconds))
        assert listening.stdout is not None
        assert listening.stdout.readline() == "ready\n"
        self.run(sender, sys.executable, "-c", SEND.format(to=ADDRESSES[receiver]))
        out, _ = listening.communicate("sent\n", timeout=120)
        return out.strip() != "nothing"


@pytest.fixture(params=LAYOUTS)
def namespaces(request: pytest.FixtureRequest) -> Iterator[Namespaces]:
    """A bridge with a server and devices on it, in the layout of `request.param`."""
    if os.geteuid() != 0 or any(shutil.which(one) is None for one in ("nsenter", "ip", "bridge", "tc")):
        unavailable("netns", "ports of a bridge take root, iproute2 and nsenter of util-linux")
    with ExitStack() as stack:
        made = Namespaces(stack)
        bridge = made.add("bridge")
        made.run("bridge", *["ip", "link", "add", "br0", "type", "bridge"])
        made.run("bridge", *["ip", "link", "set", "br0", "up"])
        for name, commands in LAYOUTS[request.param].items():
            pid = made.add(name)
            for command in commands:
                made.run("bridge", *command.format(name=name, pid=pid, bridge=bridge).split())
            made.run("bridge", *f"ip link set port-{name} master br0 up".split())
            made.run(name, *f"ip link set eth0 address {MACS[name]} up".split())
            made.run(name, *f"ip address add {ADDRESSES[name]}/24 dev eth0".split())
        yield made


def test_each_device_is_isolated_at_its_own_port(namespaces: Namespaces) -> None:
    devices = [name for name in DEVICES if name in namespaces.pids]
    ends = [Endpoint(namespaces.pids[name], MACS[name], ADDRESSES[name]) for name in devices]
    assert namespaces.reaches(devices[-1], SERVER)
    namespaces.run("bridge", sys.executable, "-m", "agents.node.isolation", "br0", *map(str, ends))

    links = json.loads(namespaces.run("bridge", "bridge", "-d", "-j", "link"))
    isolated = {link["ifname"] for link in links if link.get("isolated")}
    assert isolated == {f"port-{name}" for name in devices}
    for name in devices:
        assert namespaces.reaches(name, SERVER)
    if len(devices) > 1:
        assert not namespaces.reaches(devices[0], devices[1], seconds=0.3)
    namespaces.run(devices[0], *["ip", "link", "set", "eth0", "address", "02:42:0a:09:00:99"])
    assert not namespaces.reaches(devices[0], SERVER, seconds=0.3)


def test_process_on_another_bridge_is_refused(namespaces: Namespaces) -> None:
    elsewhere = namespaces.add("elsewhere")
    end = Endpoint(elsewhere, MACS["d-1"], ADDRESSES["d-1"])
    process = namespaces.popen("bridge", sys.executable, "-m", "agents.node.isolation", "br0", str(end))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"process {elsewhere} is not on br0" in err


def test_ended_process_has_no_namespace() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(ProcessLookupError):
        namespace_id(ended.pid)


@pytest.mark.parametrize("engine", ["20.10", "26.1", "28.5"])
def test_ports_are_found_on_recorded_bridges(engine: str) -> None:
    """Bridges of real engines: every container has a port of its own; what is being started has none."""
    recorded = json.loads(Path(__file__).with_name("bridges.json").read_text(encoding="utf-8"))[engine]
    expected = {int(nsid): name for nsid, name in recorded["ports"].items()}
    assert ports_by_namespace(recorded["links"]) == expected
