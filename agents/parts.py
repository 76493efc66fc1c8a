"""Payloads as messages of MQTT: a large one goes as several messages of one topic.

A part is `HEAD` (magic number; which body of the sender's; its number; how many there are; bytes that
follow part 0) and its share of the payload: part 0 has the header and the beginning of the body. MQTT
keeps the order of a topic's messages, and may repeat some after a reconnect; where one is lost, the
payload is, until it is sent once more.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from agents.topics import Topics

MOST = 2**20
"""Bytes that one message carries. MQTT's own limit is 268 MB. But nothing else gets through in between,
not even the ping that keeps a connection."""
_MAGIC = b"testbed\xff"
"""No message of ours begins like this: a header of safetensors would be longer than any."""
HEAD = struct.Struct("<8sQIIQ")
_MAX_PARTS = 4096
MOST_TOGETHER = _MAX_PARTS * MOST
"""Bytes of a payload."""


class Part(bytes):
    """What a part begins with. Its share of the payload is not copied to it, but is sent after it."""

    share: memoryview
    """Not to change before the message is sent."""


Messages = Sequence[bytes]
"""What carries one payload, in order; some may be a `Part`."""


@dataclass(frozen=True, slots=True)
class Body:
    """What follows a payload's header, as messages that all payloads with this body share."""

    whole: bytes = b""
    """All of it, where it is small."""
    number: int = 0
    parts: Sequence[Part] = ()
    """All but the first."""
    first: memoryview | None = None
    """The share of that one, which goes with the header; None where the body is small."""


def cut(views: Sequence[bytes | memoryview], most: int = MOST) -> Body:
    """The body that `views` make, one after the other. They are not copied, and not to change before all
    that carries them is sent."""
    if sum(map(len, views)) <= most:
        return Body(b"".join(views))
    first, *others = (
        memoryview(view)[start : start + most] for view in views for start in range(0, len(view), most)
    )
    number, count, size = secrets.randbits(63), 1 + len(others), sum(map(len, others))
    heads = (HEAD.pack(_MAGIC, number, index, count, size) for index in range(1, count))
    return Body(b"", number, tuple(map(_part, heads, others)), first)


def messages(head: bytes, body: Body) -> Messages:
    """What carries `head` and, after it, `body`."""
    if body.first is None:
        return (head + body.whole,)
    size = sum(len(part.share) for part in body.parts)
    mark = HEAD.pack(_MAGIC, body.number, 0, 1 + len(body.parts), size)
    return _part(mark + head, body.first), *body.parts


def _part(head: bytes, share: memoryview) -> Part:
    part = Part(head)
    part.share = share
    return part


def split(payload: bytes | bytearray | memoryview, most: int = MOST) -> Messages:
    """What carries a `payload` that is there in one piece, and may change."""
    return messages(b"", cut([bytes(payload)], most))


@dataclass(slots=True)
class _Unfinished:
    topic: str
    number: int
    count: int
    payload: bytearray
    following: int = 0
    """Number of the part that comes next."""
    filled: int = 0
    """Bytes that are there."""


@dataclass(slots=True)
class Joiner:
    """Puts the parts together again: of each sender, the last level of a topic, one payload at a time,
    of up to `most` bytes. (One that is in order sends a payload as a whole before the next, on whatever
    topic.)"""

    most: int = MOST_TOGETHER
    _unfinished: dict[str, _Unfinished] = field(default_factory=dict)
    """By sender."""

    def add(self, topic: str, message: bytes) -> bytes | bytearray | None:
        """The payload, once all of it is there; None until then, and for parts that make none."""
        if not is_part(message):
            return message
        if len(message) < HEAD.size:
            return None
        share = memoryview(message)[HEAD.size :]
        place = self.place(topic, message[: HEAD.size], len(share))
        if place is None:
            return None
        place[:] = share
        return self.filled(topic, len(share))

    def place(self, topic: str, head: bytes, size: int) -> memoryview | None:
        """Where the share of `size` bytes of the part with this `head` is to be put, before `filled` is
        called; None: nowhere, as it makes no payload."""
        sender = Topics.name_in(topic)
        _, number, index, count, body = HEAD.unpack(head)
        if not index < count <= _MAX_PARTS:
            return None
        if index == 0:
            self._unfinished.pop(sender, None)
            if size + body > self.most:
                return None
            self._unfinished[sender] = _Unfinished(topic, number, count, bytearray(size + body))
        found = self._unfinished.get(sender)
        if found is None or (topic, number, index) != (found.topic, found.number, found.following):
            return None  # repeated, or after one that was lost
        if found.filled + size > len(found.payload):
            del self._unfinished[sender]
            return None
        return memoryview(found.payload)[found.filled : found.filled + size]

    def filled(self, topic: str, size: int) -> bytearray | None:
        """The payload on `topic`, where the `size` bytes that have just been put in place are its last
        ones."""
        sender = Topics.name_in(topic)
        found = self._unfinished[sender]
        found.filled += size
        found.following += 1
        if found.following < found.count:
            return None
        del self._unfinished[sender]
        return found.payload if found.filled == len(found.payload) else None


def is_part(message: bytes | bytearray) -> bool:
    """Whether a message that begins like this is a part."""
    return message.startswith(_MAGIC)
