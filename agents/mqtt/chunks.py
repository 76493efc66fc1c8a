"""Payloads as messages of MQTT: a large one goes as several messages of one topic.

A chunk is `HEAD` (magic number; which body of the sender's; its number; how many there are; bytes that
follow chunk 0) and its share of the payload: chunk 0 has the header and the beginning of the body. MQTT
keeps the order of a topic's messages, and may repeat some after a reconnect; where one is lost, the
payload is, until it is sent once more.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agents.mqtt.topics import Topics

CHUNK_BYTES = 2**20
"""Bytes that one message carries. MQTT's own limit is 268 MB. But nothing else gets through in between,
not even the ping that keeps a connection."""
_MAGIC = b"testbed\xff"
"""No message of ours begins like this: a header of safetensors would be longer than any."""
HEAD = struct.Struct("<8sQIIQ")
_MAX_CHUNKS = 4096
_GROWTH = 8
"""Memory reserved for a payload, as a multiple of the bytes that have arrived, so that a sender cannot
reserve memory by announcing a size. A larger multiple copies less."""


class Chunk(bytes):
    """What a chunk begins with. Its share of the payload is not copied to it, but is sent after it."""

    share: memoryview
    """Not to change before the message is sent."""


Messages = Sequence[bytes]
"""What carries one payload, in order; some may be a `Chunk`."""


@dataclass(frozen=True, slots=True)
class Body:
    """What follows a payload's header, as messages that all payloads with this body share."""

    whole: bytes = b""
    """All of it, where it is small."""
    number: int = 0
    chunks: Sequence[Chunk] = ()
    """All but the first."""
    first: memoryview | None = None
    """The share of that one, which goes with the header; None where the body is small."""


def cut(views: Sequence[bytes | memoryview], most: int = CHUNK_BYTES) -> Body:
    """The body that `views` make, one after the other. They are not copied, and not to change before all
    that carries them is sent."""
    if sum(map(len, views)) <= most:
        return Body(b"".join(views))
    first, *others = (
        memoryview(view)[start : start + most] for view in views for start in range(0, len(view), most)
    )
    number, count, size = secrets.randbits(63), 1 + len(others), sum(map(len, others))
    heads = (HEAD.pack(_MAGIC, number, index, count, size) for index in range(1, count))
    return Body(b"", number, tuple(map(_chunk, heads, others)), first)


def chunk_messages(head: bytes, body: Body) -> Messages:
    """What carries `head` and, after it, `body`."""
    if body.first is None:
        return (head + body.whole,)
    size = sum(len(chunk.share) for chunk in body.chunks)
    mark = HEAD.pack(_MAGIC, body.number, 0, 1 + len(body.chunks), size)
    return _chunk(mark + head, body.first), *body.chunks


def _chunk(head: bytes, share: memoryview) -> Chunk:
    chunk = Chunk(head)
    chunk.share = share
    return chunk


def split(payload: bytes | bytearray | memoryview, most: int = CHUNK_BYTES) -> Messages:
    """What carries a `payload` that is there in one piece, and may change."""
    return chunk_messages(b"", cut([bytes(payload)], most))


@dataclass(slots=True)
class _Unfinished:
    topic: str
    number: int
    count: int
    size: int
    """Bytes of the whole payload, as was announced."""
    payload: bytearray = field(default_factory=bytearray)
    """Room for some of it, in the end for all."""
    following: int = 0
    """Number of the chunk that comes next."""
    filled: int = 0
    """Bytes that are there."""

    def room(self, size: int) -> memoryview:
        """The place of the next `size` bytes."""
        end = self.filled + size
        if end > len(self.payload):
            grown = bytearray(min(self.size, _GROWTH * end))
            grown[: self.filled] = memoryview(self.payload)[: self.filled]
            self.payload = grown
        return memoryview(self.payload)[self.filled : end]


@dataclass(slots=True)
class Joiner:
    """Puts the chunks together again: of each sender, the last level of a topic, one payload at a time.
    (One that is in order sends a payload as a whole before the next, on whatever topic.)"""

    most: Callable[[str], int]
    """Bytes of a payload on a topic, at most; a larger one is dropped."""
    _unfinished: dict[str, _Unfinished] = field(default_factory=dict)
    """By sender."""

    def add(self, topic: str, message: bytes) -> bytes | bytearray | None:
        """The payload, once all of it is there; None until then, and for chunks that make none."""
        if not is_chunk(message):
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
        """Where the share of `size` bytes of the chunk with this `head` is to be put, before `filled` is
        called; None: nowhere, as it makes no payload."""
        sender = Topics.name_in(topic)
        _, number, index, count, body = HEAD.unpack(head)
        if not index < count <= _MAX_CHUNKS:
            return None
        if index == 0:
            self._unfinished.pop(sender, None)
            if size + body > self.most(topic):
                return None
            self._unfinished[sender] = _Unfinished(topic, number, count, size + body)
        found = self._unfinished.get(sender)
        if found is None or (topic, number, index) != (found.topic, found.number, found.following):
            return None  # repeated, or after one that was lost
        if found.filled + size > found.size:
            del self._unfinished[sender]
            return None
        return found.room(size)

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
        return found.payload if found.filled == found.size else None


def is_chunk(message: bytes | bytearray) -> bool:
    """Whether a message that begins like this is a chunk."""
    return message.startswith(_MAGIC)
