"""Payloads in parts: whole again, whatever is repeated, lost, or made up."""

from __future__ import annotations

import struct

import pytest

from agents import parts
from agents.parts import Joiner

PAYLOAD = bytes(range(250))


def join(joiner: Joiner, messages: list[bytes], topic: str = "t") -> list[bytes]:
    return [whole for message in messages if (whole := joiner.add(topic, message)) is not None]


@pytest.mark.parametrize("most", [1000, 250, 249, 125, 100, 7])
def test_they_make_the_payload(most: int) -> None:
    messages = list(parts.split(PAYLOAD, most))
    assert len(messages) == -(-250 // most)
    assert join(Joiner(), messages) == [PAYLOAD]


def test_what_is_repeated_counts_once() -> None:
    first, second, third = parts.split(PAYLOAD, 100)
    assert join(Joiner(), [first, first, second, first, second, third]) == [PAYLOAD]


def test_what_is_lost_costs_its_payload_alone() -> None:
    one, other = list(parts.split(PAYLOAD, 100)), list(parts.split(PAYLOAD[::-1], 100))
    assert join(Joiner(), [*one[:2], *other]) == [PAYLOAD[::-1]]


def test_topics_do_not_mix() -> None:
    joiner, (first, second, third) = Joiner(), parts.split(PAYLOAD, 100)
    assert join(joiner, [first, second], "a") == join(joiner, [third], "b") == []
    assert join(joiner, [third], "a") == [PAYLOAD]


@pytest.mark.parametrize(("index", "count"), [(0, 0), (1, 1), (0, 65), (2**32 - 1, 2**32 - 1)])
def test_parts_that_make_no_payload_are_dropped(index: int, count: int) -> None:
    head = struct.pack("<8sQII", b"testbed\xff", 1, index, count)
    joiner = Joiner()
    assert join(joiner, [head + b"x", head[:9]]) == []
    assert not joiner._unfinished


def test_what_is_larger_than_any_payload_may_be_is_not_kept() -> None:
    joiner = Joiner(most=249)
    assert join(joiner, list(parts.split(PAYLOAD, 100))) == []
    assert not joiner._unfinished
    assert join(Joiner(most=250), list(parts.split(PAYLOAD, 100))) == [PAYLOAD]
