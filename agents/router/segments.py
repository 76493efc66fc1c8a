"""Shared segments of the network, shaped by the kernel in the router's network namespace.

Each direction has a tree of HTB classes on an IFB device. Packets that the router receives from devices
(up) or sends to devices (down) are redirected to the IFB before they are routed or sent:

    segup: 1: ── 1:1 backhaul ─┬─ 1:2 cell-1 ─┬─ 1:1000 a device
                               │              └─ 1:1001 another device
                               └─ 1:1002 a device

Each device has a leaf with a queue of its own. A leaf has no guaranteed rate: it borrows all of its rate
from the segments above it, each time one packet. So the kernel deals out each segment packet by packet
in turn, and rates are max-min fair over the devices. A leaf's queue splits packets that a sender has
merged (GSO), because a packet of 64 KiB would hold up the others.

A packet that a process of the router sends on the IFB itself passes the classes and is then dropped by
the kernel. Thus the rates are measured without any device, and background traffic needs no receiver.

The devices measure their own links (`agents.device.link_measurement`). Until the run clock starts, the
packets of these measurements do not enter the classes, so that all devices can measure at the same time.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from agents.config import Segment, Way, path_of
from agents.device.link import LIFTED, LinkError, burst, queue_bytes, run
from agents.device.link_measurement import PACKET
from agents.device.netlink import Netlink, ShapedClass
from agents.links import packets
from agents.links.max_min import SegmentProbe, is_enough, nearest, probes
from agents.wire.messages import SegmentFigures

Field = Literal["src", "dst"]
INTERFACES: Mapping[Way, str] = {"up": "segup", "down": "segdown"}
_HOOKS: Mapping[Way, str] = {"up": "ingress", "down": "egress"}
"""Place at the devices' interface where packets of each direction are redirected."""
_UNSHAPED = "protocol ip prio 1"
"""Filters for packets that do not enter the classes."""
FIELDS: Mapping[Way, Field] = {"up": "src", "down": "dst"}
"""Field of the IP header with the device's address."""
_MIN_RATE = 8
"""bit/s guaranteed to a class that has to borrow: the lowest rate that HTB accepts."""
_FREE_BUCKET = 1_000_000
"""Bytes of the bucket of a class that does not limit the rate."""
FIRST_LEAF = 0x1000
"""Minor number. Segments have lower ones."""
_MAX_NUMBER = 0xFFFE
MAX_LEVELS = 7
"""Segments from a leaf to the root. HTB has eight levels, and leaves are one."""
_UNLIMITED_QUEUE = 16 * 2**20
"""Bytes of a leaf's queue if no segment limits its rate."""
_FRAME_HEADER = bytes(12) + b"\x08\x00"
_MIN_FRAME, _MIN_FRAMES = 64, 10
"""Minimum bytes of a frame, and minimum number of frames, in a measurement."""
_SEND_FACTOR = 1.3
"""Multiple of the expected rate, in a measurement."""
_TICK_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Leaf:
    """Class below a segment: of one device, or of background traffic."""

    number: int
    """Minor number of the class."""
    segment: str
    """The segment that the leaf is attached to."""
    field: Field
    """Field of the IP header by which a packet belongs to the leaf."""
    address: str
    """IPv4 address in this field."""
    is_first: bool = False
    """Packets of this leaf pass before those of others."""


class SegmentTree:
    """Tree of segments, without the kernel. Raises LinkError if it does not fit the kernel's limits."""

    def __init__(self, segments: Sequence[Segment], leaves: Mapping[Way, Sequence[Leaf]]) -> None:
        """`segments`: each after its parent. `leaves`: of each direction."""
        self.segments = {segment.name: segment for segment in segments}
        self._numbers = {name: number for number, name in enumerate(self.segments, 1)}
        self.leaves = leaves
        highest = max((leaf.number for way in leaves.values() for leaf in way), default=0)
        if len(segments) >= FIRST_LEAF or highest > _MAX_NUMBER:
            raise LinkError(
                f"a router shapes at most {FIRST_LEAF - 1} segments and {_MAX_NUMBER - FIRST_LEAF} "
                f"devices, but the run has {len(segments)} segments and leaves up to {highest}"
            )
        for name in self.segments:
            if (levels := len(self.path(name))) > MAX_LEVELS:
                raise LinkError(
                    f"segment {name} is at level {levels}, but the kernel's HTB has at most "
                    f"{MAX_LEVELS} levels of segments"
                )

    def path(self, name: str) -> tuple[Segment, ...]:
        """Return the segments from `name` to the root."""
        return path_of(name, self.segments)

    def below(self, name: str) -> set[str]:
        """`name`, and all segments below it."""
        found = {name}
        for segment in self.segments.values():  # parents come first
            if segment.parent in found:
                found.add(segment.name)
        return found

    def number(self, name: str) -> int:
        return self._numbers[name]

    def leaves_of(self, name: str, way: Way) -> list[Leaf]:
        """Return the leaves of the segment and of all segments below it."""
        below = self.below(name)
        return [leaf for leaf in self.leaves[way] if leaf.segment in below]

    def commands(self, way: Way) -> list[str]:
        """Lines of a tc batch. All but the first and the filters may be repeated with other figures,
        which change the class in place."""
        dev = INTERFACES[way]
        lines = [f"qdisc add dev {dev} root handle 1: htb default 0"]
        for name, segment in self.segments.items():
            number, rate = self._numbers[name], segment.rate(way)
            above = "1:" if segment.parent is None else f"1:{self._numbers[segment.parent]:x}"
            ceil = rate or LIFTED
            bucket = burst(ceil) if rate else _FREE_BUCKET
            own = ceil if segment.parent is None else _MIN_RATE
            lines.append(
                f"class replace dev {dev} parent {above} classid 1:{number:x} htb rate {own}bit "
                f"ceil {ceil}bit burst {bucket} cburst {bucket}"
            )
        for leaf in self.leaves[way]:
            minor, above = f"{leaf.number:x}", f"1:{self._numbers[leaf.segment]:x}"
            lines += [
                f"class replace dev {dev} parent {above} classid 1:{minor} htb rate {_MIN_RATE}bit "
                f"ceil {LIFTED}bit burst {PACKET} cburst {_FREE_BUCKET} quantum {PACKET} "
                f"prio {0 if leaf.is_first else 1}",
                f"qdisc replace dev {dev} parent 1:{minor} handle {minor}: tbf rate {LIFTED}bit "
                f"burst {_FREE_BUCKET} limit {self._queue(leaf, way)} peakrate {2 * LIFTED}bit "
                f"mtu {PACKET}",
                f"filter add dev {dev} parent 1: protocol ip prio 1 u32 "
                f"match ip {leaf.field} {leaf.address}/32 flowid 1:{minor}",
            ]
        return lines

    def _queue(self, leaf: Leaf, way: Way) -> int:
        """Bytes: the queue of the slowest segment on the leaf's way."""
        limited = [one for one in self.path(leaf.segment) if one.rate(way) is not None]
        if not limited:
            return _UNLIMITED_QUEUE
        slowest = min(limited, key=lambda one: one.rate(way) or 0)
        return slowest.queue or queue_bytes(slowest.rate(way) or 0)

    def check(self, way: Way, found: Mapping[int, ShapedClass]) -> None:
        """Raise LinkError if the kernel's classes `found` differ from the segments and leaves."""
        for name, segment in self.segments.items():
            above = 0 if segment.parent is None else self._numbers[segment.parent]
            asked = above, (segment.rate(way) or LIFTED) // 8
            has = found.get(self._numbers[name])
            if has is None or (has.parent, has.ceil) != asked:
                raise LinkError(
                    f"requested {8 * asked[1]} bit/s {way} for segment {name}, but the kernel has "
                    f"{'no such class' if has is None else f'{8 * has.ceil} bit/s'}"
                )
        missing = [leaf for leaf in self.leaves[way] if leaf.number not in found]
        if missing:
            raise LinkError(f"the kernel has no class for {missing[0].address} in {missing[0].segment}")


@dataclass(slots=True)
class ShapedSegments:
    """Segments that the kernel of this network namespace shapes. Methods raise LinkError and OSError."""

    tree: SegmentTree
    _netlink: Netlink = field(default_factory=Netlink)
    _lines: dict[Way, list[str]] = field(default_factory=dict)
    """Lines of tc batches that were carried out."""
    _left: dict[Way, dict[int, int]] = field(default_factory=dict)
    """Bytes that had left each class at the last call of `use`, by direction and minor number."""
    _read_at: float = 0.0
    _inside: str | None = None
    """The devices' interface while the packets of their measurements are not shaped."""

    def set_up(self, inside: str) -> None:
        """Make the classes, and redirect the packets of `inside`, the devices' interface, to them."""
        run(["tc", "qdisc", "replace", "dev", inside, "clsact"])
        self._inside = inside
        for way, dev in INTERFACES.items():
            run(f"ip link add {dev} txqueuelen 10000 type ifb".split())
            run(f"ip link set {dev} up".split())
            lines = self.tree.commands(way)
            try:
                _batch(lines)
            except LinkError as error:
                raise LinkError(
                    "the kernel cannot share segments, which takes sch_htb, sch_tbf, cls_u32, "
                    f"act_mirred and ifb: {error}"
                ) from error
            self._lines[way] = lines
            for line in redirection(way):
                run(f"tc filter add dev {inside} {line}".split())
        self._check()

    def start(self) -> None:
        """Shape all packets from now on, also those of the devices' measurements."""
        inside, self._inside = self._inside, None
        for way in INTERFACES if inside is not None else ():
            run(f"tc filter del dev {inside} {_HOOKS[way]} {_UNSHAPED}".split())

    def change(self, segment: Segment) -> None:
        """Change the figures in place."""
        before = self.tree
        segments = [segment if one.name == segment.name else one for one in before.segments.values()]
        self.tree = SegmentTree(segments, before.leaves)
        for way, lines in self._lines.items():
            new, old = self.tree.commands(way), set(lines)
            _batch([line for line in new if line not in old])
            self._lines[way] = new
        self._check()

    def _check(self) -> None:
        for way in INTERFACES:
            self.tree.check(way, self._classes(way))

    def _classes(self, way: Way) -> dict[int, ShapedClass]:
        return self._netlink.classes(socket.if_nametoindex(INTERFACES[way]))

    def use(self, now: float) -> tuple[float, dict[Way, dict[int, int]]]:
        """Seconds since the last call, and bytes that left each class, by direction and minor number.
        `now`: monotonic time."""
        found: dict[Way, dict[int, int]] = {}
        for way in INTERFACES:
            left = {number: one.left for number, one in self._classes(way).items()}
            before = self._left.get(way, left)
            found[way] = {number: total - before.get(number, 0) for number, total in left.items()}
            self._left[way] = left
        seconds, self._read_at = now - (self._read_at or now), now
        return seconds, found

    def measure(self, names: Collection[str]) -> list[SegmentFigures]:
        """Both directions at the same time, with one leaf alone, and with all leaves at once. Nothing
        else may send much meanwhile."""
        with ThreadPoolExecutor(len(INTERFACES)) as pool:
            measured = pool.map(partial(self._measure, names), INTERFACES)
            return [figures for found in measured for figures in found]

    def _measure(self, names: Collection[str], way: Way) -> list[SegmentFigures]:
        leaves = {leaf: leaf.segment for leaf in self.tree.leaves[way]}
        with packet_socket(INTERFACES[way]) as sock, closing(Netlink()) as netlink:
            return [
                probe.figures([self._fill(sock, netlink, probe, load) for load in probe.loads])
                for probe in probes(leaves, self.tree.segments, way)
                if probe.segment in names
            ]

    def _fill(
        self,
        sock: socket.socket,
        netlink: Netlink,
        probe: SegmentProbe[Leaf],
        load: Mapping[Leaf, float],
    ) -> float:
        """Measured bit/s while the leaves in `load` send."""
        measured: list[float] = []
        while not is_enough(measured, load):
            measured.append(self._fill_once(sock, netlink, probe, load))
        return nearest(measured, load)

    def _fill_once(
        self,
        sock: socket.socket,
        netlink: Netlink,
        probe: SegmentProbe[Leaf],
        shares: Mapping[Leaf, float],
    ) -> float:
        interface = socket.if_nametoindex(INTERFACES[probe.way])
        number = self.tree.number(probe.segment)
        rate = sum(shares.values())
        seconds = max(probe.seconds, _MIN_FRAMES * 8 * _MIN_FRAME / rate)
        # At least 50 frames in the measured time, so that one more or less makes no difference, unless
        # the segment is slow.
        size = max(_MIN_FRAME, min(PACKET, int(rate / 8 * seconds / 50)))
        frames = [(frame(one.field, one.address, size), share / 8) for one, share in shares.items()]
        # At once so much that the buckets on the way are empty, and all queues hold something.
        buckets = burst(round(rate)) * max(len(self.tree.path(one.segment)) for one in shares)
        ahead = [3 * size + buckets * share / rate for share in shares.values()]
        sent = [0.0] * len(frames)
        measured: list[tuple[float, int]] = []
        start = time.monotonic()
        warm, end = start + seconds / 5, start + seconds
        left: int | None = None
        while len(measured) < 2:
            now = time.monotonic()
            if now >= (end if measured else warm):
                before, left = left, netlink.classes(interface)[number].left
                # From the end of one frame to that of another: few pass a slow segment in the time.
                if before not in (left, None) or now >= end + seconds:
                    measured.append((time.monotonic(), left))
                    left = None
            for index, ((data, per_second), first) in enumerate(zip(frames, ahead, strict=True)):
                while sent[index] < first + _SEND_FACTOR * per_second * (now - start):
                    with suppress(OSError):  # the interface's queue is full
                        sock.send(data)
                    sent[index] += size
            time.sleep(_TICK_SECONDS)
        (first_at, first_left), (last_at, last_left) = measured
        backlog = sum(sent) - rate / 8 * (last_at - start)
        time.sleep(max(0.0, 8 * backlog / rate))
        return 8 * (last_left - first_left) / (last_at - first_at)


def redirection(way: Way) -> list[str]:
    """tc filters to the classes, except for the devices' measurements: UDP of the packet trains, and
    ICMP."""
    hook, port = _HOOKS[way], f"{'dport' if way == 'up' else 'sport'} {packets.PORT} 0xffff"
    return [
        f"{hook} {_UNSHAPED} u32 match ip protocol 17 0xff match ip {port} flowid 1:1",
        f"{hook} {_UNSHAPED} u32 match ip protocol 1 0xff flowid 1:1",
        f"{hook} protocol ip prio 2 u32 match u32 0 0 "
        f"action mirred egress redirect dev {INTERFACES[way]}",
    ]


def packet_socket(interface: str) -> socket.socket:
    """Sends frames on `interface`. Raises OSError."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * 2**20)
    sock.bind((interface, 0x0800))
    sock.settimeout(0)
    return sock


def frame(field: Field, address: str, size: int) -> bytes:
    """Ethernet frame of `size` bytes with `address` in this field of its IP header."""
    nobody = "198.18.255.254"
    source, destination = (address, nobody) if field == "src" else (nobody, address)
    ends = socket.inet_aton(source), socket.inet_aton(destination)
    header = struct.pack("!BBHHHBBH4s4s", 0x45, 0, size - 14, 0, 0, 64, 253, 0, *ends)
    return (_FRAME_HEADER + header).ljust(size, b"\0")


def _batch(lines: Sequence[str]) -> None:
    """Raises LinkError with the first line that failed."""
    if not lines:
        return
    text = "\n".join(lines) + "\n"
    result = subprocess.run(
        ["tc", "-batch", "-"], input=text, capture_output=True, text=True, check=False
    )
    if result.returncode or "Error" in result.stderr:
        raise LinkError(f"`tc -batch` of `{lines[0]}` … failed: {result.stderr.strip()}")
