"""The router's rules."""

from __future__ import annotations

from agents.device.delayline import Impairment
from agents.router.main import (
    forwarding_rules,
    impairment,
    new_forwarding_rules,
    queue_rules,
)


def _lines(rules: list[list[str]]) -> list[str]:
    return [" ".join(rule) for rule in rules]


def test_only_the_servers_ports_are_forwarded() -> None:
    assert _lines(forwarding_rules({"10.0.0.9": 1883}, "eth0", "eth1")) == [
        "-P FORWARD DROP",
        "-A FORWARD -i eth1 -o eth0 -j ACCEPT",
        "-A FORWARD -i eth0 -p tcp -d 10.0.0.9 --dport 1883 -j ACCEPT",
        "-A FORWARD -i eth0 -p udp -d 10.0.0.9 --dport 1883 -j ACCEPT",
        "-t nat -A PREROUTING -i eth0 -p tcp --dport 1883 -j DNAT --to-destination 10.0.0.9:1883",
        "-t nat -A PREROUTING -i eth0 -p udp --dport 1883 -j DNAT --to-destination 10.0.0.9:1883",
        "-t nat -A POSTROUTING -o eth1 -j MASQUERADE",
    ]


def test_new_server_address_replaces_the_old_one() -> None:
    assert _lines(new_forwarding_rules({"10.0.0.10": 1883}, "eth0", "eth1")) == [
        "-F FORWARD",
        "-t nat -F PREROUTING",
        *_lines(forwarding_rules({"10.0.0.10": 1883}, "eth0", "eth1"))[:-1],
    ]


def test_a_device_has_a_queue_for_each_direction() -> None:
    assert _lines(queue_rules("10.0.1.2", 4, 5)) == [
        "-t mangle -A FORWARD -s 10.0.1.2 -j NFQUEUE --queue-num 4",
        "-t mangle -A FORWARD -d 10.0.1.2 -j NFQUEUE --queue-num 5",
        "-t mangle -A INPUT -s 10.0.1.2 -p icmp -j NFQUEUE --queue-num 4",
        "-t mangle -A OUTPUT -d 10.0.1.2 -p icmp -j NFQUEUE --queue-num 5",
    ]


def test_each_direction_has_half_of_the_round_trip() -> None:
    assert impairment({"rtt": 0.08, "jitter": 0.01, "loss": 0.02}) == Impairment(0.04, 0.01, 0.02)
    assert impairment({}) == Impairment()
