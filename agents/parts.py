"""Payloads that are larger than a message of MQTT may be, as several messages of one topic.

A part is `_HEAD` (magic number; which payload of the sender's; its number; how many there are) and its
share of the payload. A smaller payload is sent as it is. MQTT keeps the order of a topic's messages, and
may repeat some after a reconnect; where one is lost, the payload is, until it is sent once more.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

MOST = 64 * 2**20
"""Bytes that one message carries. MQTT's own limit is 268 MB; smaller ones take less of the broker's
memory, which has a message several times, and let others through in between."""
_MAGIC = b"testbed\xff"
"""No message of ours begins like this: a header of safetensors would be longer than any."""
_HEAD = struct.Struct("<8sQII")
_MAX_PARTS = 64
MOST_TOGETHER = _MAX_PARTS * MOST
"""Bytes of a payload."""


def split(payload: bytes, most: int = MOST) -> Iterator[bytes]:
    """The messages that `payload` is sent as."""
    if len(payload) <= most:
        yield payload
        return
    whole, number = memoryview(payload), secrets.randbits(63)
    count = -(-len(payload) // most)
    for index in range(count):
        part = whole[index * most : (index + 1) * most]
        yield b"".join((_HEAD.pack(_MAGIC, number, index, count), part))


@dataclass(slots=True)
class _Unfinished:
    number: int
    parts: dict[int, memoryview] = field(default_factory=dict)


@dataclass(slots=True)
class Joiner:
    """Puts the parts together again: of each topic one payload at a time, of up to `most` bytes."""

    most: int = MOST_TOGETHER
    _unfinished: dict[str, _Unfinished] = field(default_factory=dict)

    def add(self, topic: str, message: bytes) -> bytes | None:
        """The payload, once all of it is there; None until then, and for parts that make none."""
        if not message.startswith(_MAGIC):
            return message
        if len(message) < _HEAD.size:
            return None
        _, number, index, count = _HEAD.unpack_from(message)
        if not index < count <= _MAX_PARTS:
            return None
        found = self._unfinished.get(topic)
        if found is None or found.number != number:
            found = self._unfinished[topic] = _Unfinished(number)
        found.parts[index] = memoryview(message)[_HEAD.size :]
        if sum(map(len, found.parts.values())) > self.most:
            del self._unfinished[topic]
            return None
        if found.parts.keys() != set(range(count)):
            return None
        del self._unfinished[topic]
        return b"".join(found.parts[each] for each in range(count))
