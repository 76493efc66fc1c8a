"""The access link of a device, shaped by the kernel in the device's own network namespace.

Uplink: tbf at the interface's egress. Downlink: ingress is redirected to an IFB device whose egress has
a tbf (u32 matches everything; many kernels lack matchall). tc gets integer bit/s only: its own `mbps`
means megabytes. What was applied is read back; any difference from what was requested is a LinkError.

With netem, where the kernel has it, each tbf has a netem as its child, which makes delay, jitter and
loss. A packet is lost or delayed, then it queues for the rate:

    tbf 1: ── netem 10: ── bfifo 100:
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import replace

from agents.config import Link

_IFB = "ifb0"
LIFTED = 100_000_000_000
"""bit/s: a limit that is never met, for one that there was."""
_PACKET = 1514
"""Bytes of a full packet, Ethernet header included."""
_NETEM_LIMIT = 10_000_000
"""Packets: more than 1 Gbit/s sends in a minute."""
_MAX_JITTER_SECONDS = 2.1
"""The kernel draws from twice the jitter in 32 bits of nanoseconds."""


class LinkError(Exception):
    """The link cannot be made as requested."""


def burst(rate: int) -> int:
    """Bucket size in bytes for `rate` in bit/s: 2 ms of it, at least one full packet.

    What the bucket holds passes at once after a pause, however slow the link: a bigger one would let a
    small model through unshaped.
    """
    return max(_PACKET, rate // 8 // 500)


def commands(
    link: Link, interface: str, before: Link | None = None, *, netem: bool = False
) -> list[list[str]]:
    """What is to be executed, in order, for `link` on `interface`, where it is now as `before` (None:
    nothing was ever made). Without `netem` its rates alone; with it all of it.

    Changes are made in place: tc's `replace` changes a qdisc that is there, and packets in its queue
    stay. Nothing is ever taken apart: a limit is lifted by asking for the rate LIFTED. With netem there
    is a tbf each way from the start, so that no netem has to take the place of a queue with packets.
    """
    if netem:
        link, before = _complete(link), before and _complete(before)
    was = before or Link()
    impaired = netem and (before is None or _impairment(link) != _impairment(before))
    lines = [one_by_one(interface)] if netem and before is None else []
    for device, rate, old in ((interface, link.up, was.up), (_IFB, link.down, was.down)):
        if rate is None:
            continue
        replace_qdisc = f"tc qdisc replace dev {device}"
        if device == _IFB and old is None:
            lines += _redirect(interface)
        if rate != old:
            lines.append(f"{replace_qdisc} root handle 1: {_tbf(rate)}")
        if impaired:
            lines.append(f"{replace_qdisc} parent 1:1 handle 10: {_netem(link)}")
        if netem and rate != old:
            lines.append(f"{replace_qdisc} parent 10:1 handle 100: bfifo limit {_queue(rate)}")
    return [line.split() for line in lines]


def one_by_one(interface: str) -> str:
    """The command after which `interface` sends single packets: else up to 64 KiB of a TCP connection
    come as one, which netem would lose or delay as a whole."""
    return f"ip link set dev {interface} gso_max_segs 1"


def apply(link: Link, interface: str, before: Link | None = None, *, netem: bool = False) -> None:
    """Shape `interface` as `link` asks, and read it back. Raises LinkError."""
    for command in commands(link, interface, before, netem=netem):
        run(command)
    if netem:
        link = _complete(link)
    for rate, device in ((link.up, interface), (link.down, _IFB)):
        if rate is not None:
            _check(link, rate, device, netem=netem)


def plug(interface: str, *, up: bool) -> None:
    """Take the cable out, or put it back in: no packet passes meanwhile. Raises LinkError."""
    run(["ip", "link", "set", interface, "up" if up else "down"])


def interface_towards(address: str) -> str:
    """The interface that routes to `address`. Raises LinkError."""
    route = run(["ip", "route", "get", address])
    match = re.search(r"\bdev (\S+)", route)
    if match is None:
        raise LinkError(f"no interface routes to {address}: {route}")
    return match[1]


def interface() -> str:
    """The container's one interface that is not the kernel's own. Raises LinkError."""
    names = [each["ifname"] for each in json.loads(run(["ip", "-j", "link", "show", "type", "veth"]))]
    if len(names) != 1:
        raise LinkError(f"expected one interface, found {', '.join(names) or 'none'}")
    return str(names[0])


def _complete(link: Link) -> Link:
    """`link` with a rate each way."""
    return replace(link, up=link.up or LIFTED, down=link.down or LIFTED)


def _impairment(link: Link) -> tuple[float, float, float]:
    """Of each way: delay and jitter in seconds, share of packets lost."""
    return link.rtt / 2, link.jitter, link.loss


def _redirect(interface: str) -> list[str]:
    return [
        f"ip link add {_IFB} type ifb",
        f"ip link set {_IFB} up",
        f"tc qdisc add dev {interface} handle ffff: ingress",
        f"tc filter add dev {interface} parent ffff: protocol all u32 match u32 0 0 "
        f"action mirred egress redirect dev {_IFB}",
    ]


def _queue(rate: int) -> int:
    """Bytes that wait for `rate`: 200 ms of it, as in an access router; at least a dozen packets."""
    return max(12 * _PACKET, rate // 8 // 5)


def _tbf(rate: int) -> str:
    return f"tbf rate {rate}bit burst {burst(rate)} limit {_queue(rate)}"


def _netem(link: Link) -> str:
    """Delay uniform in delay ± jitter, independent losses, and packets in order.

    The `rate`, which is never met, makes netem time a packet after the one before it. Without one it
    sorts packets by the time when each is due, so that they overtake each other under jitter and when
    the delay is cut. The limit is never met either: it counts packets, however small, and would drop
    acknowledgements that are under way. What waits for the rate is limited by the bfifo, in bytes.
    """
    delay, jitter, loss = _impairment(link)
    if jitter >= _MAX_JITTER_SECONDS:
        raise LinkError(
            f"netem takes no jitter of {jitter:g} s: lower it below {_MAX_JITTER_SECONDS:g} s"
        )
    return (
        f"netem limit {_NETEM_LIMIT} delay {round(1e6 * delay)}us {round(1e6 * jitter)}us "
        f"loss {100 * loss:.6f}% rate {LIFTED}bit"
    )


def _check(link: Link, rate: int, device: str, *, netem: bool) -> None:
    """Raises LinkError unless `device`'s egress is as `link` asks."""
    qdiscs = json.loads(run(["tc", "-j", "qdisc", "show", "dev", device]))
    options = {qdisc["kind"]: qdisc["options"] for qdisc in qdiscs}
    found = 8 * int(options["tbf"]["rate"]) if "tbf" in options else None
    if found != rate // 8 * 8:  # it counts in bytes per second
        raise LinkError(f"asked for {rate} bit/s on {device}, the kernel has {found}")
    if not netem:
        return
    made = options.get("netem", {})
    times, lost = made.get("delay", {}), made.get("loss-random", {})
    got = (times.get("delay", 0.0), times.get("jitter", 0.0), lost.get("loss", 0.0))
    pairs = zip(_impairment(link), got, strict=True)
    near = all(math.isclose(*pair, rel_tol=1e-3, abs_tol=1e-6) for pair in pairs)
    if not near or "rate" not in made or made.get("limit") != _NETEM_LIMIT:
        raise LinkError(f"asked for `{_netem(link)}` on {device}, the kernel has {made or 'none'}")
    if (queue := options.get("bfifo", {}).get("limit")) != _queue(rate):
        raise LinkError(f"asked for a queue of {_queue(rate)} bytes on {device}, the kernel has {queue}")


def run(command: list[str]) -> str:
    """What `command` prints. Raises LinkError with what it says where it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise LinkError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout
