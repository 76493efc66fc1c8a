"""The router's rules, and how fast a link is measured to be."""

from __future__ import annotations

from agents import speedtest
from agents.device.delayline import Impairment
from agents.router import forwarding
from agents.router.main import impairment


def _lines(rules: list[list[str]]) -> list[str]:
    return [" ".join(rule) for rule in rules]


def test_the_port_leads_to_the_broker() -> None:
    assert _lines(forwarding.forward(1883, "10.0.0.9", "eth0", "eth1")) == [
        "-t nat -A PREROUTING -i eth0 -p tcp --dport 1883 -j DNAT --to-destination 10.0.0.9:1883",
        "-t nat -A POSTROUTING -o eth1 -j MASQUERADE",
    ]


def test_a_device_has_a_queue_for_each_direction() -> None:
    assert _lines(forwarding.hold("10.0.1.2", 4, 5)) == [
        "-t mangle -A FORWARD -s 10.0.1.2 -j NFQUEUE --queue-num 4",
        "-t mangle -A FORWARD -d 10.0.1.2 -j NFQUEUE --queue-num 5",
    ]


def test_each_way_has_half_of_the_round_trip() -> None:
    assert impairment({"rtt": 0.08, "jitter": 0.01, "loss": 0.02}) == Impairment(0.04, 0.01, 0.02)
    assert impairment({}) == Impairment()


def test_a_measure_takes_a_second_and_neither_too_few_bytes_nor_too_many() -> None:
    assert speedtest.size(2_000_000) == 250_000
    assert speedtest.size(64_000) == 12_000
    assert speedtest.size(1_000_000_000) == 4_000_000


def test_both_directions_are_measured() -> None:
    """Through the loopback interface, which is faster than any link."""
    speedtest.listen("lo")
    assert speedtest.upload("127.0.0.1", 100_000_000) > 100_000_000
    assert speedtest.download("127.0.0.1", 100_000_000) > 100_000_000
    assert 0 < speedtest.round_trip("127.0.0.1", speedtest.PORT) < 1
