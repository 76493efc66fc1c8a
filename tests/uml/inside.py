"""Init of a user-mode Linux that has netem and cgroup v2: makes a device and its broker, measures the
table's links, and reads the table's limits of a control group.

Its own network namespace is the device's, 10.213.0.2; a veth pair joins it to the broker's, 10.213.0.1.
Prints a line of JSON for each measurement, then powers off. Nothing is written but to memory: the host's
files are mounted read-only.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import structs

from agents.config import AccessLink
from agents.device import link, link_measurement
from agents.device.control_group import ControlGroup
from agents.links import packets, probe_server
from testbed.relay.relay_process import download_probe, listen, upload_probe
from tests.uml.table import (
    DELAYS,
    FAST,
    JITTER,
    JITTER_PACKETS,
    LIMITS,
    LOSS_PACKETS,
    LOSSES,
    MODEL,
    MODEL_RATE,
    RATES,
    SLOW,
    WAYS,
    WHOLE,
    Flood,
    full,
)

DEVICE, BROKER = "10.213.0.2", "10.213.0.1"
MODULES = (
    "drivers/net/veth",
    "drivers/net/ifb numifbs=0",  # else it makes two by itself
    "net/sched/sch_netem",
    "net/sched/sch_tbf",
    "net/sched/sch_ingress",
    "net/sched/cls_u32",
    "net/sched/act_mirred",
)
SETUP = """\
ip netns add broker
ip link add eth0 type veth peer name eth0 netns broker
ip link set lo up
ip address add 10.213.0.2/24 dev eth0
ip link set eth0 up
ip -n broker address add 10.213.0.1/24 dev eth0
ip -n broker link set eth0 up
"""
TRANSFERS = 1885
"""TCP port."""
LONGEST = 120.0
"""Seconds that all of it may take."""
POWER_OFF = 0x4321FEDC
NEW_NETWORK = 0x40000000
SO_RCVBUFFORCE, SO_TIMESTAMPNS = 33, 35
STAMP = struct.Struct("qq")
NUMBERED = struct.Struct("!IQ")
"""A packet: its number, and when it was sent in ns."""

libc = ctypes.CDLL(None, use_errno=True)

Packet = tuple[int, float, float]
"""Number; seconds when it was sent and when the kernel received it."""


def main() -> None:
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    alarm = threading.Timer(LONGEST, power_off)  # whoever started us may not live to end us
    alarm.daemon = True
    alarm.start()
    for kind, where in (("proc", "/proc"), ("tmpfs", "/run")):
        subprocess.run(["mount", "-t", kind, kind, where], check=True)
    modules = Path("/usr/lib/uml/modules", os.uname().release, "kernel")
    for module, *options in map(str.split, MODULES):
        subprocess.run(["insmod", modules / f"{module}.ko", *options], check=True)
    for line in SETUP.splitlines():
        subprocess.run(line.split(), check=True)
    Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 0")  # as in a device's container
    with in_broker():
        threading.Thread(target=probe_server.listen(BROKER).serve_forever, daemon=True).start()
        packets.listen_for_trains(BROKER)
        listen(BROKER, TRANSFERS)
    limits()
    shaped = Shaped()
    for measure in (rates, model, whole, delays, jitter, losses, change):
        begin = time.monotonic()
        measure(shaped)
        tell("took", measure.__name__, time.monotonic() - begin)


def limits() -> None:
    """Limits of a group of cgroup v2, written as an engine writes them, and read back."""
    root = Path("/run/cgroup")
    root.mkdir()
    subprocess.run(["mount", "-t", "cgroup2", "cgroup2", root], check=True)
    (root / "cgroup.subtree_control").write_text("+cpu +memory")
    group = root / "testbed.slice" / "device.scope"
    group.mkdir(parents=True)
    (group.parent / "cgroup.subtree_control").write_text("+cpu +memory")
    with subprocess.Popen(["sleep", "600"]) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        for case, (files, _) in LIMITS.items():
            for name, text in files.items():
                (group / name).write_text(text)
            found = ControlGroup.of_process(process.pid).limits()
            tell("limits", case, None if found is None else structs.asdict(found))
        process.kill()


class Shaped:
    """The device's link, as its init keeps it: every change is made in place."""

    def __init__(self) -> None:
        self._now: AccessLink | None = None

    def set(self, wanted: AccessLink) -> None:
        link.apply(wanted, "eth0", self._now, netem=True)
        self._now = wanted


def rates(shaped: Shaped) -> None:
    for up, down in RATES:
        shaped.set(AccessLink(up, down))
        tell("rate", f"up {up}", fastest(upload_probe, up))
        tell("rate", f"down {down}", fastest(download_probe, down))


def fastest(move: Callable[[str, int, int], float], rate: int) -> float:
    """bit/s of at most three transfers: a busy host makes them slower, and nothing makes them faster."""
    best = 0.0
    for _ in range(3):
        best = max(best, move(BROKER, TRANSFERS, rate))
        if best > 0.93 * rate:
            break
    return best


def model(shaped: Shaped) -> None:
    """Seconds of one transfer; the shortest of three, as a busy host only makes them longer."""
    shaped.set(AccessLink(MODEL_RATE, MODEL_RATE))
    for way in WAYS:
        tell("model", way, min(transfer(way) for _ in range(3)))


def transfer(way: str) -> float:
    """A connection of its own, from its beginning to the last byte's arrival; seconds."""
    with ends(way, socket.SOCK_STREAM) as (sender, receiver, address):
        receiver.listen()
        begin = time.monotonic()
        sender.connect(address)
        taken, _ = receiver.accept()
        thread = threading.Thread(target=sender.sendall, args=(bytes(MODEL),))
        thread.start()
        left = MODEL
        while left:
            left -= len(taken.recv(1 << 16))
        took = time.monotonic() - begin
        thread.join()
        taken.close()
        return took


def whole(shaped: Shaped) -> None:
    shaped.set(WHOLE)
    found = structs.asdict(link_measurement.measure(WHOLE, BROKER, 30.0))
    for name, got in found.items():
        if got is not None:
            tell("whole", name, got)


def delays(shaped: Shaped) -> None:
    for delay in DELAYS:
        shaped.set(AccessLink(rtt=2 * delay))
        for way in WAYS:
            packets = stream(way, 20, gap=0.005, patience=delay + 0.1)
            tell("delay", f"{way} {delay}", [received - sent for _, sent, received in packets])


def jitter(shaped: Shaped) -> None:
    """Packets so far apart that none waits for the one before it; then some close together. Where the
    host held some up for longer than the link may: again, at most five times."""
    shaped.set(JITTER)
    longest = JITTER.rtt / 2 + JITTER.jitter + 0.001
    for way in WAYS:
        for _ in range(5):
            packets = stream(way, JITTER_PACKETS, gap=2 * JITTER.jitter, patience=0.1)
            found = [received - sent for _, sent, received in packets]
            if max(found) < longest:
                break
        tell("jitter", way, found)
        packets = stream(way, 200, gap=0.0, patience=0.1)
        tell("order", way, [number for number, _, _ in packets])


def losses(shaped: Shaped) -> None:
    for loss in LOSSES:
        shaped.set(AccessLink(loss=loss))
        for way in WAYS:
            tell("loss", f"{way} {loss}", LOSS_PACKETS - len(stream(way, LOSS_PACKETS)))


def change(shaped: Shaped) -> None:
    """A flood through FAST; in its midst the link becomes SLOW. When that began and was done, and every
    packet's arrival and number; times since the first was sent.

    A host that holds up the machine interrupts the flood, and then nothing is shown: again, at most
    five times. What must not pass is held against every flood's packets by the test."""
    for way in WAYS:
        floods = []
        for _ in range(5):
            floods.append(flood(shaped, way))
            if full(floods[-1], way):
                break
        tell("change", way, floods)


def flood(shaped: Shaped, way: str) -> Flood:
    shaped.set(FAST)
    changed: list[float] = []

    def slow() -> None:
        time.sleep(0.3)
        changed.append(time.time())
        shaped.set(SLOW)
        changed.append(time.time())

    thread = threading.Thread(target=slow)
    thread.start()
    packets = stream(way, 2500, gap=0.0009, size=1472, patience=0.5)
    thread.join()
    begin = packets[0][1]
    arrivals = [(received - begin, number) for number, _, received in packets]
    return {"changed": [at - begin for at in changed], "arrivals": arrivals}


def stream(
    way: str, count: int, gap: float = 0.0, size: int = NUMBERED.size, patience: float = 0.1
) -> list[Packet]:
    """Send `count` UDP packets, `gap` seconds apart; those that arrived `patience` after the last.
    Without a gap, packets do not have the time when they were sent, because each look at the clock takes
    as long as a packet here."""
    with ends(way, socket.SOCK_DGRAM) as (sender, receiver, address):
        receiver.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 28)
        receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        receiver.setblocking(False)
        begin = time.monotonic()
        for number in range(count):
            if gap and (wait := begin + gap * number - time.monotonic()) > 0:
                time.sleep(wait)
            now = time.time_ns() if gap else 0
            sender.sendto(NUMBERED.pack(number, now).ljust(size), address)
        time.sleep(patience)
        return list(_received(receiver))


def _received(receiver: socket.socket) -> Iterator[Packet]:
    while True:
        try:
            data, more, _, _ = receiver.recvmsg(2048, 64)
        except BlockingIOError:
            return
        number, sent = NUMBERED.unpack_from(data)
        seconds, nanoseconds = STAMP.unpack(more[0][2])
        yield number, sent / 1e9, seconds + nanoseconds / 1e9


@contextmanager
def ends(way: str, kind: int) -> Iterator[tuple[socket.socket, socket.socket, tuple[str, int]]]:
    """Sender, receiver and the receiver's address."""
    with in_broker():
        there = socket.socket(socket.AF_INET, kind)
    with there, socket.socket(socket.AF_INET, kind) as here:
        sender, receiver, host = (here, there, BROKER) if way == "up" else (there, here, DEVICE)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        receiver.bind((host, 9000))
        yield sender, receiver, (host, 9000)


@contextmanager
def in_broker() -> Iterator[None]:
    """Create sockets and processes in the broker's network namespace."""
    with Path("/proc/self/ns/net").open() as ours, Path("/run/netns/broker").open() as broker:
        enter(broker.fileno())
        try:
            yield
        finally:
            enter(ours.fileno())


def enter(namespace: int) -> None:
    if libc.setns(namespace, NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def tell(row: str, case: str, got: object) -> None:
    sys.stdout.write(json.dumps({"row": row, "case": case, "got": got}) + "\n")
    sys.stdout.flush()


def power_off() -> None:
    libc.reboot(POWER_OFF)


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001  # where init just ends, the kernel panics
        traceback.print_exc()
    power_off()
