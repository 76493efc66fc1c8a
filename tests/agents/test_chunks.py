"""Payloads in chunks: whole again, whatever is repeated, lost, or made up."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

from agents.mqtt import chunks
from agents.mqtt.chunks import Joiner

PAYLOAD = bytes(range(250))


def joiner_of(most: int = 1000) -> Joiner:
    return Joiner(lambda _: most)


def sent(message: bytes) -> bytes:
    """Return the chunk's bytes on the wire."""
    return message + message.share if isinstance(message, chunks.Chunk) else message


def join(joiner: Joiner, messages: Sequence[bytes], topic: str = "t") -> list[bytes | bytearray]:
    return [whole for each in messages if (whole := joiner.add(topic, sent(each))) is not None]


@pytest.mark.parametrize("most", [1000, 250, 249, 125, 100, 7])
def test_chunks_are_joined_to_the_payload(most: int) -> None:
    messages = chunks.split(PAYLOAD, most)
    assert len(messages) == -(-250 // most)
    assert join(joiner_of(), messages) == [PAYLOAD]


@pytest.mark.parametrize("most", [1000, 100])
def test_payloads_share_a_body(most: int) -> None:
    body = chunks.cut([PAYLOAD[:120], memoryview(PAYLOAD)[120:]], most)
    one, other = chunks.chunk_messages(b"to a", body), chunks.chunk_messages(b"to b!", body)
    assert join(joiner_of(), [*one, *other]) == [b"to a" + PAYLOAD, b"to b!" + PAYLOAD]
    if most == 100:  # two chunks of the first 120 bytes, two of the others
        assert [len(sent(chunk)) - chunks.HEAD.size for chunk in one] == [104, 20, 100, 30]
        assert all(mine is yours for mine, yours in zip(one[1:], other[1:], strict=True))


def test_repeated_chunks_count_once() -> None:
    first, second, third, last = chunks.split(PAYLOAD, 70)
    repeated = [first, first, second, first, second, third, second, third, last, third, last]
    assert join(joiner_of(), repeated) == [PAYLOAD]


def test_lost_chunk_only_affects_its_payload() -> None:
    one, other = chunks.split(PAYLOAD, 70), chunks.split(PAYLOAD[::-1], 70)
    assert join(joiner_of(), [*one[:2], *other]) == [PAYLOAD[::-1]]
    assert join(joiner_of(), [*one[:2], *one[3:], *other]) == [PAYLOAD[::-1]]
    assert join(joiner_of(), [*one[1:], *other]) == [PAYLOAD[::-1]]


def test_chunks_of_different_topics_are_kept_apart() -> None:
    joiner, (*most, last) = joiner_of(), chunks.split(PAYLOAD, 100)
    assert join(joiner, most, "a") == join(joiner, [last], "b") == []
    assert join(joiner, [last], "a") == [PAYLOAD]


def test_one_unfinished_payload_is_kept_per_sender() -> None:
    """A sender with an unfinished payload on each of its topics holds the memory of one."""
    joiner, (first, *others) = joiner_of(), chunks.split(PAYLOAD, 100)
    for topic in ("r/update/a", "r/report/a", "r/sums/a"):
        assert join(joiner, [first], topic) == []
    assert sum(len(one.payload) for one in joiner._unfinished.values()) == 250
    assert join(joiner, [first], "r/update/b") == []
    assert join(joiner, others, "r/report/a") == []  # it is the last one's, not of this topic
    assert join(joiner, others, "r/sums/a") == join(joiner, others, "r/update/b") == [PAYLOAD]
    assert not joiner._unfinished


@pytest.mark.parametrize(("index", "count"), [(0, 0), (1, 1), (0, 4097), (2**32 - 1, 2**32 - 1)])
def test_invalid_chunks_are_dropped(index: int, count: int) -> None:
    head = struct.pack("<8sQIIQ", b"testbed\xff", 1, index, count, 1)
    joiner = joiner_of()
    assert join(joiner, [head + b"x", head[:9]]) == []
    assert not joiner._unfinished


def test_memory_grows_with_the_received_chunks() -> None:
    """An announced payload of 64 MiB reserves nothing at its head, and later at most eight times the
    received bytes."""
    joiner = joiner_of(2**26)
    head = chunks.HEAD.pack(b"testbed\xff", 1, 0, 64, 2**26)
    assert joiner.add("t", head) is None
    (unfinished,) = joiner._unfinished.values()
    taken = []
    for index in range(1, 64):
        joiner.add("t", chunks.HEAD.pack(b"testbed\xff", 1, index, 64, 0) + bytes(1000))
        taken.append(len(unfinished.payload))
    assert taken[:3] == [8000, 8000, 8000]
    assert taken[7:10] == [8000, 72_000, 72_000]
    assert max(size / (1000 * (n + 1)) for n, size in enumerate(taken)) == 8
    payload = bytes(range(256)) * 1000
    assert join(joiner_of(256_000), chunks.split(payload, 5000)) == [payload]


def test_each_topic_has_its_own_size_limit() -> None:
    joiner = Joiner({"r/share/b/a": 250, "r/sums/a": 249}.__getitem__)
    parts = chunks.split(PAYLOAD, 100)
    assert join(joiner, parts, "r/share/b/a") == [PAYLOAD]
    assert join(joiner, parts, "r/sums/a") == []
    assert not joiner._unfinished


def test_oversized_payload_is_not_kept() -> None:
    joiner = joiner_of(most=249)
    assert join(joiner, list(chunks.split(PAYLOAD, 100))) == []
    assert not joiner._unfinished
    assert join(joiner_of(most=250), list(chunks.split(PAYLOAD, 100))) == [PAYLOAD]
