"""The access link of a device, shaped by the kernel in the device's own network namespace, and its
lasting faults."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.config import AccessLink
from agents.device.link_measurement import PACKET, Backlog
from agents.device.netlink import Netlink
from agents.disturbances import UNANSWERED_SECONDS, cut
from agents.wire.messages import QueueUse

# The access link of a device, shaped by the kernel in the device's own network namespace.
#
# The uplink is shaped by a tbf at the interface's egress. For the downlink, a u32 filter that matches
# all packets (many kernels lack matchall) redirects the ingress to an IFB device, whose egress has a
# tbf. tc gets rates as whole bit/s, because its `mbps` means megabytes per second. The settings are read
# back; LinkError is raised if they differ from the requested link.
#
# A TCP sender hands over several packets as one (GSO), and tbf queues them as one if they fit into its
# bucket. If the rate is then reduced, they do not fit into the smaller bucket, and nothing leaves the
# queue any more. So each tbf also has a second bucket of one packet, for a peak rate that is never
# reached: tbf splits larger packets before it queues them.
#
# If the kernel has netem, each tbf has a netem as its child, for delay, jitter and loss. A packet that
# netem does not drop is first delayed, then it waits in the queue for the rate:
#
#     tbf 1: ── netem 10: ── bfifo 100:

IFB = "ifb0"
"""Name of the IFB device, in a container, which has a network namespace of its own."""
_TBF, _QUEUE_FOR_RATE = 0x1, 0x100
"""Major numbers of the handles of tbf and bfifo. Only a link with netem has a bfifo, where packets wait
for the tbf's rate."""
LIFTED = 100_000_000_000
"""bit/s of a link without limit: so high that it is never reached."""
_PEAK = 2 * LIFTED
_MTU = 1500
"""Bytes of a full packet, without the Ethernet header."""
_NETEM_LIMIT = 10_000_000
"""Packets that netem holds: more than a link of 1 Gbit/s sends in a minute."""
_MAX_JITTER_SECONDS = 2.1
"""Jitter must be lower: the kernel stores twice the jitter, in nanoseconds, in a 32-bit number."""


class LinkError(Exception):
    pass


def burst(rate: int) -> int:
    """Bytes of the bucket: 2 ms of `rate` (bit/s), at least one full packet.

    After a pause, a full bucket passes at once, even on a slow link. With a larger one, a small model
    would not be slowed down at all.
    """
    return max(PACKET, rate // 8 // 500)


def commands(
    link: AccessLink,
    interface: str,
    before: AccessLink | None = None,
    *,
    netem: bool = False,
    ifb: str = IFB,
) -> list[list[str]]:
    """Return the commands, in order, that change `interface` from `before` (None if never shaped) to
    `link`. Without `netem`, they set only the rates. `ifb`: name of the IFB device.

    Changes are made in place: tc's `replace` changes an existing qdisc, and packets stay in its queue.
    Nothing is ever removed; to lift a limit, the rate is set to LIFTED. With netem, both directions have
    a tbf from the start, so that no netem has to replace a queue that holds packets.
    """
    if netem:
        link, before = _complete(link), before and _complete(before)
    was = before or AccessLink()
    impaired = netem and (before is None or _impairment(link) != _impairment(before))
    lines: list[str] = []
    for device, rate, old in ((interface, link.up, was.up), (ifb, link.down, was.down)):
        if rate is None:
            continue
        replace_qdisc = f"tc qdisc replace dev {device}"
        if device == ifb and old is None:
            lines += _redirect(interface, ifb)
        if rate != old:
            lines.append(f"{replace_qdisc} root handle 1: {_tbf(rate)}")
        if impaired:
            lines.append(f"{replace_qdisc} parent 1:1 handle 10: {_netem(link)}")
        if netem and rate != old:
            lines.append(f"{replace_qdisc} parent 10:1 handle 100: bfifo limit {queue_bytes(rate)}")
    return [line.split() for line in lines]


def apply(
    link: AccessLink,
    interface: str,
    before: AccessLink | None = None,
    *,
    netem: bool = False,
    ifb: str = IFB,
) -> None:
    """Read the settings back. Raises LinkError if they differ from `link`."""
    if before is None:
        _limit_packets(interface)
    for command in commands(link, interface, before, netem=netem, ifb=ifb):
        run(command)
    if netem:
        link = _complete(link)
    for rate, device in ((link.up, interface), (link.down, ifb)):
        if rate is not None:
            _check(link, rate, device, netem=netem)


class LinkUsage:
    """Measurement of a shaped link during the run: bytes that leave each direction's queue while packets
    wait."""

    def __init__(self, interface: str, netlink: Netlink, ifb: str = IFB) -> None:
        self._netlink = netlink
        self._interfaces = {"up": interface, "down": ifb}
        self._backlogs = {way: Backlog() for way in self._interfaces}
        self._altered_since: dict[str, float] = {}
        """Time of the first reading with another rate than that of the link, or without the tbf, in
        seconds on the monotonic clock, by direction. Directions in order have no entry."""

    def read(self, link: AccessLink, at: float) -> bool:
        """Return whether packets wait. `link`: settings from now on. `at`: monotonic time. Raises
        OSError."""
        queues, is_waiting = self._netlink.queues(), False
        for way, rate in (("up", link.up), ("down", link.down)):
            if rate is None or rate == LIFTED:
                self._backlogs[way].pause()
                self._altered_since.pop(way, None)
                continue
            number = socket.if_nametoindex(self._interfaces[way])
            passed = queues.get((number, _TBF))
            if passed is not None and passed.rate == rate // 8:
                self._altered_since.pop(way, None)
            else:
                self._altered_since.setdefault(way, at)
            if passed is None:
                self._backlogs[way].pause()
                continue
            waiting = queues.get((number, _QUEUE_FOR_RATE), passed).waiting
            unsent = 0
            if way == "up" and waiting:
                unsent = sum(one.unsent for one in self._netlink.connections())
            self._backlogs[way].read(at, passed.left, waiting, rate, unsent)
            is_waiting |= waiting > 0
        return is_waiting

    def pause(self) -> None:
        """The time until the next reading does not count."""
        for backlog in self._backlogs.values():
            backlog.pause()

    def uses(self) -> dict[str, QueueUse]:
        """Return, by direction, the totals of the queue over the time during which packets waited."""
        return {way: backlog.use for way, backlog in self._backlogs.items()}

    def altered_since(self) -> dict[str, float]:
        """Return, by direction, the time since which the kernel has another rate than requested, in
        seconds on the monotonic clock. Only directions that were altered from outside have an entry."""
        return self._altered_since

    def stuck_since(self) -> dict[str, float]:
        """By direction that is stuck: monotonic time since which nothing has left the queue."""
        found = {way: backlog.stuck_since for way, backlog in self._backlogs.items()}
        return {way: since for way, since in found.items() if since is not None}


def plug(interface: str, *, up: bool) -> None:
    """Like a cable. Raises LinkError."""
    run(["ip", "link", "set", interface, "up" if up else "down"])


def has_carrier(interface: str) -> bool:
    """The interface exists and its other end is up."""
    try:
        return Path(f"/sys/class/net/{interface}/carrier").read_text().strip() == "1"
    except OSError:
        return False


def interface_towards(address: str) -> str:
    """Interface that routes to `address`. Raises LinkError."""
    route = run(["ip", "route", "get", address])
    match = re.search(r"\bdev (\S+)", route)
    if match is None:
        raise LinkError(f"no interface routes to {address}: {route}")
    return match[1]


def interface() -> str:
    """The container's only veth interface. Raises LinkError if there is none or more than one."""
    names = [each["ifname"] for each in json.loads(run(["ip", "-j", "link", "show", "type", "veth"]))]
    if len(names) != 1:
        raise LinkError(f"expected one veth interface, found {', '.join(names) or 'none'}")
    return str(names[0])


def _limit_packets(interface: str) -> None:
    """Reduce jumbo frames to an MTU of 1500 bytes: a tbf's bucket may hold no larger packet. Raises
    LinkError."""
    (found,) = json.loads(run(["ip", "-j", "link", "show", "dev", interface]))
    if found["mtu"] > _MTU:
        run(["ip", "link", "set", "dev", interface, "mtu", str(_MTU)])


def _complete(link: AccessLink) -> AccessLink:
    """LIFTED replaces a missing rate."""
    return replace(link, up=link.up or LIFTED, down=link.down or LIFTED)


def _impairment(link: AccessLink) -> tuple[float, float, float]:
    """Delay and jitter in seconds, and share of lost packets, in each direction."""
    return link.rtt / 2, link.jitter, link.loss


def _redirect(interface: str, ifb: str) -> list[str]:
    return [
        f"ip link add {ifb} type ifb",
        f"ip link set {ifb} up",
        f"tc qdisc add dev {interface} handle ffff: ingress",
        f"tc filter add dev {interface} parent ffff: protocol all u32 match u32 0 0 "
        f"action mirred egress redirect dev {ifb}",
    ]


def full_queue_seconds(link: AccessLink | None) -> float:
    """Seconds that full queues need to drain, the sum of both directions."""
    rates = () if link is None else [rate for rate in (link.up, link.down) if rate is not None]
    return sum(8 * queue_bytes(rate) / rate for rate in rates)


def queue_bytes(rate: int) -> int:
    """Bytes in 200 ms of `rate`, as in an access router, but at least 12 packets."""
    return max(12 * PACKET, rate // 8 // 5)


def _tbf(rate: int) -> str:
    return (
        f"tbf rate {rate}bit burst {burst(rate)} limit {queue_bytes(rate)} peakrate {_PEAK}bit "
        f"mtu {PACKET}"
    )


def _netem(link: AccessLink) -> str:
    """Delay uniform in delay ± jitter, independent losses, no reordering.

    `rate` is never reached, but makes netem schedule each packet after the one before it. Without it,
    netem sorts packets by due time, so that they overtake each other under jitter and when the delay is
    reduced. `limit` is never reached either: it counts packets of any size, so a smaller one would drop
    acknowledgements in flight. The bfifo limits the queue for the rate in bytes.
    """
    delay, jitter, loss = _impairment(link)
    if jitter >= _MAX_JITTER_SECONDS:
        raise LinkError(
            f"jitter is {jitter:g} s, but netem supports only values below {_MAX_JITTER_SECONDS:g} s"
        )
    return (
        f"netem limit {_NETEM_LIMIT} delay {round(1e6 * delay)}us {round(1e6 * jitter)}us "
        f"loss {100 * loss:.6f}% rate {LIFTED}bit"
    )


def _check(link: AccessLink, rate: int, device: str, *, netem: bool) -> None:
    """Raise LinkError if the kernel does not shape the egress of `device` with `rate` (bit/s) and, with
    `netem`, with delay, jitter and loss of `link`."""
    qdiscs = json.loads(run(["tc", "-j", "qdisc", "show", "dev", device]))
    options = {qdisc["kind"]: qdisc["options"] for qdisc in qdiscs}
    found = 8 * int(options["tbf"]["rate"]) if "tbf" in options else None
    if found != rate // 8 * 8:  # the kernel counts whole bytes per second
        raise LinkError(f"requested {rate} bit/s on {device}, but the kernel has {found}")
    if not netem:
        return
    made = options.get("netem", {})
    times, lost = made.get("delay", {}), made.get("loss-random", {})
    got = (times.get("delay", 0.0), times.get("jitter", 0.0), lost.get("loss", 0.0))
    pairs = zip(_impairment(link), got, strict=True)
    near = all(math.isclose(*pair, rel_tol=1e-3, abs_tol=1e-6) for pair in pairs)
    if not near or "rate" not in made or made.get("limit") != _NETEM_LIMIT:
        raise LinkError(f"requested `{_netem(link)}` on {device}, but the kernel has {made or 'none'}")
    if (queue := options.get("bfifo", {}).get("limit")) != queue_bytes(rate):
        raise LinkError(
            f"requested a queue of {queue_bytes(rate)} bytes on {device}, but the kernel has {queue}"
        )


def run(command: list[str]) -> str:
    """Return the output. Raises LinkError with the error output if the command fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise LinkError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout


_READ_SECONDS = 0.1
"""Between two readings of a queue while packets wait: half of the time in which a full queue drains."""


class ShapedLink:
    """`netem`: the kernel's netem emulates delay, jitter and loss there. `ifb`: interface that is made
    for the downlink."""

    def __init__(self, device: str, interface: str, *, netem: bool, ifb: str = IFB) -> None:
        self._device, self._interface, self._netem, self._ifb = device, interface, netem, ifb
        self._link: AccessLink | None = None
        """Settings that were applied last."""
        self._usage: LinkUsage | None = None
        """None while the link is not shaped."""
        self._plugged = True
        """Whether the interface should be up according to the last order; True if there was no order."""
        self._netlink = Netlink()
        self.reading_due = math.inf
        """Monotonic time at which `read_queues` is due; infinite if not."""

    def apply(self, wanted: AccessLink) -> None:
        """Raises LinkError."""
        self.read_queues()
        apply(wanted, self._interface, self._link, netem=self._netem, ifb=self._ifb)
        self._link = wanted
        if self._usage is None:
            self._usage = LinkUsage(self._interface, self._netlink, self._ifb)
        self._usage.pause()  # since the last reading, either rate may have applied
        self.read_queues()

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change properties of the link, as in `SetLink`. Raises LinkError."""
        lifted = {name: LIFTED if value is None else value for name, value in changes.items()}
        self.apply(replace(self._link or AccessLink(), **lifted))

    def plug(self, *, up: bool) -> None:
        """Raises LinkError."""
        self.read_queues()
        plug(self._interface, up=up)
        self._plugged = up
        if self._usage is not None:
            self._usage.pause()

    def read_queues(self) -> None:
        """If packets wait, schedule the next reading: only the time during which they wait says
        something about the link."""
        self.reading_due = math.inf
        if self._usage is None or self._link is None or not self._plugged:
            return
        now = time.monotonic()
        try:
            is_waiting = self._usage.read(self._link, now)
        except OSError:  # the interface was removed from outside
            self._usage.pause()
        else:
            self.reading_due = now + _READ_SECONDS if is_waiting else math.inf

    def uses(self) -> dict[str, QueueUse]:
        """Fields `uplink` and `downlink` of a sample, if the direction has a limit."""
        found = {} if self._usage is None else self._usage.uses()
        return {f"{way}link": use for way, use in found.items()}

    @property
    def is_cut(self) -> bool:
        """No carrier, although nobody has ordered that."""
        return self._plugged and not has_carrier(self._interface)

    def stuck_queues(self) -> dict[str, float]:
        """By description: monotonic time since which a stuck queue has sent nothing."""
        stuck = {} if self._usage is None else self._usage.stuck_since()
        return {
            f"the {way}link of {self._device} carried nothing though packets waited": since
            for way, since in stuck.items()
        }

    def lasting_faults(self, now: float) -> dict[str, float]:
        """Like `stuck_queues`, with rates that were altered from outside, and a connection of the
        network namespace without answers. `now`: monotonic time."""
        altered = {} if self._usage is None else self._usage.altered_since()
        found = self.stuck_queues() | {
            f"the rate of the {way}link of {self._device} was altered from outside": since
            for way, since in altered.items()
        }
        silent = max((one.unanswered for one in self._netlink.connections()), default=0.0)
        if self._plugged and silent >= UNANSWERED_SECONDS + full_queue_seconds(self._link):
            found[cut(self._device)] = now - silent
        return found

    def close(self) -> None:
        self._netlink.close()
