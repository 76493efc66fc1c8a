"""Isolation of the devices on a bridge from each other and from the host, by the host's kernel.

    python -m agents.node.isolation BRIDGE PROCESS,MAC,ADDRESS ...

A device's init holds NET_ADMIN in its network namespace, so it could give its interface any address.
Therefore its port of the bridge is restricted from outside. No frame passes from one device to another.
A frame from a device, even an ARP frame, is accepted only if it has its own MAC and IPv4 address. No
frame passes from the bridge to the host, because services of the host may listen on all addresses. Other
ports (broker, aggregator, router) are not changed. All rules disappear with the bridge.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LOAD, _LOAD_HALF, _EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
"""Instructions of classic BPF, which needs no compiler, and which most kernels support."""
_PASS, _DROP = 0, 2
"""Verdicts of a traffic control filter."""
_SENDER, _KIND, _ARP_SENDER, _ARP_ADDRESS, _IP_ADDRESS = 6, 12, 22, 28, 26
"""Offsets of fields in a frame, in bytes."""
_IPV4, _ARP = 0x0800, 0x0806
_NOTHING = f"1,{_RETURN} 0 0 {_DROP}"

_NLMSG_ERROR, _RTM_GETNSID, _REQUEST = 2, 90, 1
_NETNSA_NSID, _NETNSA_PID = 1, 2
_NSID_QUESTION = struct.Struct("=IHHIIB3xHHI")
"""Question for a namespace's id: a netlink header, an rtgenmsg and one attribute (linux/netlink.h,
linux/net_namespace.h)."""
_NSID_ANSWER = struct.Struct("=IHHIIB3xHHi")
_NETLINK_ERROR = struct.Struct("=IHHIIi")


class IsolationError(Exception):
    """The text says why the devices cannot be isolated."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    process: int
    """A process in the device's network namespace, in the host's numbering."""
    mac: str
    address: str
    """IPv4."""

    def __str__(self) -> str:
        return f"{self.process},{self.mac},{self.address}"


def main() -> None:
    bridge, *ends = sys.argv[1:]
    endpoints = [Endpoint(int(p), m, a) for p, m, a in (end.split(",") for end in ends)]
    try:
        isolate(bridge, endpoints)
    except (IsolationError, OSError) as error:
        sys.exit(f"isolation: {error}")


def isolate(bridge: str, endpoints: Sequence[Endpoint]) -> None:
    """Endpoints whose process has ended are skipped. Needs NET_ADMIN. Raises IsolationError, OSError."""
    # List the ports first, because the kernel numbers network namespaces only when ports are listed.
    ports = ports_by_namespace(_links_on(bridge))
    settings, filters = [], _filter(bridge, _NOTHING)
    for end in endpoints:
        try:
            port = ports.get(namespace_id(end.process))
        except ProcessLookupError:
            continue
        if port is None:
            raise IsolationError(f"process {end.process} is not on {bridge}")
        settings.append(f"link set dev {port} isolated on")
        filters += _filter(port, own_frames(end.mac, end.address))
    _run(["tc", "-batch", "-"], filters)
    _run(["bridge", "-batch", "-"], settings)


def own_frames(mac: str, address: str) -> str:
    """BPF program, in tc's notation, that passes only IPv4 and ARP frames from `mac` and `address`."""
    whole = bytes.fromhex(mac.replace(":", ""))
    first, last = int.from_bytes(whole[:4], "big"), int.from_bytes(whole[4:], "big")
    own = int.from_bytes(socket.inet_aton(address), "big")

    program = [
        (_LOAD, 0, 0, _SENDER),
        (_EQUAL, 0, 14, first),
        (_LOAD_HALF, 0, 0, _SENDER + 4),
        (_EQUAL, 0, 12, last),
        (_LOAD_HALF, 0, 0, _KIND),
        (_EQUAL, 7, 0, _IPV4),
        (_EQUAL, 0, 9, _ARP),
        (_LOAD, 0, 0, _ARP_SENDER),
        (_EQUAL, 0, 7, first),
        (_LOAD_HALF, 0, 0, _ARP_SENDER + 4),
        (_EQUAL, 0, 5, last),
        (_LOAD, 0, 0, _ARP_ADDRESS),
        (_EQUAL, 2, 3, own),
        (_LOAD, 0, 0, _IP_ADDRESS),
        (_EQUAL, 0, 1, own),
        (_RETURN, 0, 0, _PASS),
        (_RETURN, 0, 0, _DROP),
    ]
    return ",".join([str(len(program)), *(" ".join(map(str, line)) for line in program)])


def _filter(interface: str, program: str) -> list[str]:
    """Commands that filter all frames received on `interface`."""
    return [
        f"qdisc add dev {interface} ingress",
        f"filter add dev {interface} parent ffff: protocol all bpf da bytecode '{program}'",
    ]


def _links_on(bridge: str) -> list[dict[str, Any]]:
    """Interfaces on `bridge`, by `ip -j`."""
    done = subprocess.run(
        ["ip", "-j", "link", "show", "master", bridge], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise IsolationError(done.stderr.strip())
    links: list[dict[str, Any]] = json.loads(done.stdout)
    return links


def ports_by_namespace(links: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Ports of the bridge by the id of the network namespace at the other end.

    The id identifies a container's port, because a container is on a bridge only once. The interface
    number of the other end does not: it is 2 in every container since Docker 28. The port of a starting
    container is not listed, because its other end is still in this namespace.
    """
    return {link["link_netnsid"]: link["ifname"] for link in links if link.get("link_netnsid", -1) >= 0}


def namespace_id(process: int) -> int:
    """The kernel's id, in this namespace, for the network namespace of `process`; −1 if no interface
    leads there, because there is no id then. Raises ProcessLookupError if the process has ended."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as route:
        size = _NSID_QUESTION.size
        route.send(_NSID_QUESTION.pack(size, _RTM_GETNSID, _REQUEST, 1, 0, 0, 8, _NETNSA_PID, process))
        answer = route.recv(4096)
    if _NETLINK_ERROR.unpack_from(answer)[1] == _NLMSG_ERROR:
        code = -_NETLINK_ERROR.unpack_from(answer)[-1]
        raise OSError(code, os.strerror(code))  # ESRCH makes it a ProcessLookupError
    return int(_NSID_ANSWER.unpack_from(answer)[-1])


def _run(command: list[str], lines: Sequence[str]) -> None:
    done = subprocess.run(
        command, input="\n".join([*lines, ""]), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise IsolationError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
