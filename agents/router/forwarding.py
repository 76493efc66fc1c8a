"""What makes the router's network namespace forward: the rules, and which iptables takes them.

Devices talk to the router as if it were the broker; it passes their connections on under its own
address, so that neither side needs a route. A device whose packets are to be delayed or lost has two
queues, one per direction, where the delay line holds them after they were received.
"""

from __future__ import annotations

from collections.abc import Mapping

from agents.device.link import LinkError, run

_TABLES = ("iptables", "iptables-legacy")


def forward(targets: Mapping[str, int], inside: str, outside: str) -> list[list[str]]:
    """Ports of `inside`, the devices' interface, lead to their addresses on `outside`."""
    leads = [
        f"-t nat -A PREROUTING -i {inside} -p {protocol} --dport {port} "
        f"-j DNAT --to-destination {address}:{port}".split()
        for address, port in targets.items()
        for protocol in ("tcp", "udp")
    ]
    return [*leads, f"-t nat -A POSTROUTING -o {outside} -j MASQUERADE".split()]


def hold(address: str, up: int, down: int) -> list[list[str]]:
    """What comes from and goes to the device at `address` waits in the queues `up` and `down`: what is
    forwarded, and the echoes that the link is measured by."""
    return [
        f"-t mangle -A FORWARD -s {address} -j NFQUEUE --queue-num {up}".split(),
        f"-t mangle -A FORWARD -d {address} -j NFQUEUE --queue-num {down}".split(),
        f"-t mangle -A INPUT -s {address} -p icmp -j NFQUEUE --queue-num {up}".split(),
        f"-t mangle -A OUTPUT -d {address} -p icmp -j NFQUEUE --queue-num {down}".split(),
    ]


def program() -> str:
    """The iptables that this kernel takes. Raises LinkError."""
    problem = ""
    for name in _TABLES:
        try:
            run([name, "-t", "nat", "-S"])
            run([name, "-t", "mangle", "-S"])
        except (LinkError, OSError) as error:
            problem = problem or str(error)
        else:
            return name
    raise LinkError(f"the kernel takes no iptables rules: {problem}")
