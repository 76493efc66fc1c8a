"""Payloads as messages of MQTT: a large one goes as several messages of one topic.

A part is `_HEAD` (magic number; which body of the sender's; its number; how many there are) and its
share of the payload: part 0 has the header, the others the body. MQTT keeps the order of a topic's
messages, and may repeat some after a reconnect; where one is lost, the payload is, until it is sent once
more.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

MOST = 2**20
"""Bytes that one message carries. MQTT's own limit is 268 MB. But whenever paho has sent some of a
message it copies the rest, and what it has received three times; and nothing else gets through in
between, not even the ping that keeps a connection."""
_MAGIC = b"testbed\xff"
"""No message of ours begins like this: a header of safetensors would be longer than any."""
_HEAD = struct.Struct("<8sQII")
_MAX_PARTS = 4096
MOST_TOGETHER = _MAX_PARTS * MOST
"""Bytes of a payload."""

Messages = Sequence[bytes]
"""What carries one payload, in order."""


@dataclass(frozen=True, slots=True)
class Body:
    """What follows a payload's header, as messages that all payloads with this body share."""

    whole: bytes | None
    """All of it; None where it is large."""
    number: int = 0
    parts: Messages = ()


def cut(views: Sequence[bytes | bytearray | memoryview], most: int = MOST) -> Body:
    """The body that `views` make, one after the other; they are copied."""
    if sum(map(len, views)) <= most:
        return Body(b"".join(views))
    shares = [
        memoryview(view)[start : start + most] for view in views for start in range(0, len(view), most)
    ]
    number, count = secrets.randbits(63), 1 + len(shares)
    heads = (_HEAD.pack(_MAGIC, number, index, count) for index in range(1, count))
    return Body(None, number, tuple(map(b"".join, zip(heads, shares, strict=True))))


def messages(head: bytes, body: Body) -> Messages:
    """What carries `head` and, after it, `body`."""
    if body.whole is not None:
        return (head + body.whole,)
    return _HEAD.pack(_MAGIC, body.number, 0, 1 + len(body.parts)) + head, *body.parts


def split(payload: bytes | bytearray | memoryview, most: int = MOST) -> Messages:
    """What carries a `payload` that is there in one piece."""
    return messages(b"", cut([payload], most))


@dataclass(slots=True)
class _Unfinished:
    number: int
    payload: bytearray
    following: int = 1
    """Number of the part that comes next."""


@dataclass(slots=True)
class Joiner:
    """Puts the parts together again: of each topic one payload at a time, of up to `most` bytes."""

    most: int = MOST_TOGETHER
    _unfinished: dict[str, _Unfinished] = field(default_factory=dict)

    def add(self, topic: str, message: bytes) -> bytes | bytearray | None:
        """The payload, once all of it is there; None until then, and for parts that make none."""
        if not message.startswith(_MAGIC):
            return message
        if len(message) < _HEAD.size:
            return None
        _, number, index, count = _HEAD.unpack_from(message)
        if not index < count <= _MAX_PARTS:
            return None
        share = memoryview(message)[_HEAD.size :]
        found = self._unfinished.get(topic)
        if index == 0:
            found = self._unfinished[topic] = _Unfinished(number, bytearray(share))
        elif found is None or (number, index) != (found.number, found.following):
            return None  # repeated, or after one that was lost
        else:
            found.payload += share
            found.following += 1
        if len(found.payload) > self.most:
            del self._unfinished[topic]
            return None
        if found.following < count:
            return None
        del self._unfinished[topic]
        return found.payload
