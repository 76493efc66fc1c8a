"""The access link of a device, shaped by the kernel in the device's own network namespace.

Uplink: tbf at the interface's egress. Downlink: ingress is redirected to an IFB device whose egress has
a tbf (u32 matches everything; many kernels lack matchall). tc gets integer bit/s only: its own `mbps`
means megabytes. What was applied is read back; anything else than what was asked is a LinkError.
"""

from __future__ import annotations

import json
import re
import subprocess

from agents.config import Link

_IFB = "ifb0"
_UNLIMITED = Link()
LIFTED = 100_000_000_000
"""bit/s: a limit that is never met, for one that there was."""
_PACKET = 1514
"""Bytes of a full packet, Ethernet header included."""


class LinkError(Exception):
    """The link cannot be made as asked."""


def burst(rate: int) -> int:
    """Bucket size in bytes for `rate` in bit/s: 2 ms of it, at least one full packet.

    What the bucket holds passes at once after a pause, however slow the link: a bigger one would let a
    small model through unshaped.
    """
    return max(_PACKET, rate // 8 // 500)


def commands(link: Link, interface: str, before: Link = _UNLIMITED) -> list[list[str]]:
    """What is to be executed, in order, for `link` on `interface`, where it is now as `before`.

    A rate changes in place: tc's `replace` changes a tbf that is there, and packets in its queue stay.
    Nothing is ever taken apart: a limit is lifted by asking for the rate LIFTED.
    """
    lines: list[str] = []
    if link.up is not None and link.up != before.up:
        lines.append(f"tc qdisc replace dev {interface} root {_tbf(link.up)}")
    if link.down is not None and link.down != before.down:
        if before.down is None:
            lines += [
                f"ip link add {_IFB} type ifb",
                f"ip link set {_IFB} up",
                f"tc qdisc add dev {interface} handle ffff: ingress",
                f"tc filter add dev {interface} parent ffff: protocol all u32 match u32 0 0 "
                f"action mirred egress redirect dev {_IFB}",
            ]
        lines.append(f"tc qdisc replace dev {_IFB} root {_tbf(link.down)}")
    return [line.split() for line in lines]


def apply(link: Link, interface: str, before: Link = _UNLIMITED) -> None:
    """Shape `interface` as `link` asks, and read it back. Raises LinkError."""
    for command in commands(link, interface, before):
        run(command)
    for rate, device in ((link.up, interface), (link.down, _IFB)):
        if rate is not None and (found := _rate(device)) != rate:
            raise LinkError(f"asked for {rate} bit/s on {device}, the kernel has {found}")


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


def interface_besides(other: str) -> str:
    """The container's interface that is neither `other` nor the kernel's own. Raises LinkError."""
    links = json.loads(run(["ip", "-j", "link", "show", "type", "veth"]))
    names = [each["ifname"] for each in links if each["ifname"] != other]
    if len(names) != 1:
        raise LinkError(f"expected one interface beside {other}, found {', '.join(names) or 'none'}")
    return str(names[0])


def _tbf(rate: int) -> str:
    # A queue of 200 ms at the rate, as an access router has; at least a dozen packets.
    limit = max(12 * _PACKET, rate // 8 // 5)
    return f"tbf rate {rate}bit burst {burst(rate)} limit {limit}"


def _rate(device: str) -> int | None:
    """Rate in bit/s of the tbf at `device`'s egress."""
    qdiscs = json.loads(run(["tc", "-j", "qdisc", "show", "dev", device]))
    rates = [q["options"]["rate"] for q in qdiscs if q["kind"] == "tbf"]
    return 8 * int(rates[0]) if rates else None


def run(command: list[str]) -> str:
    """What `command` prints. Raises LinkError with what it says where it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise LinkError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout
