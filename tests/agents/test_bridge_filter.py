"""Packets that the port of a device accepts, computed from its filter program."""

from __future__ import annotations

import pytest

from agents.node.isolation import own_frames

OWN, OTHER = "02:42:c0:a8:d0:02", "02:42:c0:a8:d0:03"
HERE, THERE = bytes((192, 168, 208, 2)), bytes((192, 168, 208, 3))


def passes(frame: bytes) -> bool:
    """Whether `own_frames` lets `frame` in: its instructions carried out as the kernel does."""
    text = own_frames(OWN, "192.168.208.2").split(",")
    program = [tuple(map(int, line.split())) for line in text[1:]]
    assert len(program) == int(text[0])
    loaded, at = 0, 0
    while True:
        code, if_true, if_false, value = program[at]
        at += 1
        match code:
            case 0x20 | 0x28:
                loaded = int.from_bytes(frame[value : value + (4 if code == 0x20 else 2)], "big")
            case 0x15:
                at += if_true if loaded == value else if_false
            case 0x06:
                return value == 0


def frame(mac: str, kind: int, rest: bytes) -> bytes:
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) + kind.to_bytes(2, "big") + rest


def arp(mac: str, address: bytes) -> bytes:
    return bytes(8) + bytes.fromhex(mac.replace(":", "")) + address + bytes(10)


def ipv4(address: bytes) -> bytes:
    return bytes(12) + address + bytes(4)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (frame(OWN, 0x0800, ipv4(HERE)), True),
        (frame(OWN, 0x0806, arp(OWN, HERE)), True),
        (frame(OWN, 0x0800, ipv4(THERE)), False),
        (frame(OTHER, 0x0800, ipv4(HERE)), False),
        ("02:42:c0:a9:d0:02", False),
        (frame(OWN, 0x0806, arp(OWN, THERE)), False),
        (frame(OWN, 0x0806, arp(OTHER, HERE)), False),
        (frame(OTHER, 0x0806, arp(OTHER, HERE)), False),
        (frame(OWN, 0x86DD, bytes(40)), False),
        (frame(OWN, 0x8100, ipv4(HERE)), False),
    ],
)
def test_device_can_only_send_from_its_own_addresses(sent: bytes | str, expected: bool) -> None:
    whole = sent if isinstance(sent, bytes) else frame(sent, 0x0800, ipv4(HERE))
    assert passes(whole) is expected
