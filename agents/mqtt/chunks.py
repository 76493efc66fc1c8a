"""Payloads as MQTT messages: a large payload is split into chunks, several messages on one topic.

A chunk has a head (`HEAD`) and a part of the payload. The head has a magic number, a random number that
identifies the payload's body, the index of the chunk, the number of chunks, and the number of bytes in
all chunks except the first. Chunk 0 has the payload's header and the beginning of its body. MQTT keeps
the order of a topic's messages, and may repeat messages after a reconnect. If a chunk is lost, the whole
payload is lost.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agents.mqtt.topics import Topics

CHUNK_BYTES = 2**20
"""Payload in one message. MQTT's own limit is 268 MB, but while a message is sent, nothing else can be
sent, not even the ping that keeps the connection alive."""
_MAGIC = b"testbed\xff"
"""First bytes of a chunk. No other message of the testbed begins so: read as the length of a safetensors
header, they would be far too large a number."""
HEAD = struct.Struct("<8sQIIQ")
_MAX_CHUNKS = 4096
_GROWTH = 8
"""Memory reserved for a payload, as a multiple of the bytes that have arrived, so that a sender cannot
reserve memory by announcing a large size. A larger multiple would copy fewer bytes."""


class Chunk(bytes):
    """Beginning of a chunk. Its part of the payload, `share`, is sent afterwards without being
    copied."""

    share: memoryview
    """The memory must not change before the message is sent."""


Messages = Sequence[bytes]
"""Together one payload, in order. Each may be a `Chunk`."""


@dataclass(frozen=True, slots=True)
class Body:
    """Part of a payload after its header, cut into chunks, which payloads with equal bodies share."""

    whole: bytes = b""
    """Empty if it does not fit into one message."""
    number: int = 0
    """Random, for identification."""
    chunks: Sequence[Chunk] = ()
    """All but the first."""
    first: memoryview | None = None
    """Part of the first chunk, which also has the header; None if the body fits into one message."""


def cut(views: Sequence[bytes | memoryview], most: int = CHUNK_BYTES) -> Body:
    """Cut the concatenation of `views` into chunks of at most `most` bytes. The views must not change
    before the messages are sent, because large views are not copied."""
    if sum(map(len, views)) <= most:
        return Body(b"".join(views))
    first, *others = (
        memoryview(view)[start : start + most] for view in views for start in range(0, len(view), most)
    )
    number, count, size = secrets.randbits(63), 1 + len(others), sum(map(len, others))
    heads = (HEAD.pack(_MAGIC, number, index, count, size) for index in range(1, count))
    return Body(b"", number, tuple(map(_chunk, heads, others)), first)


def chunk_messages(head: bytes, body: Body) -> Messages:
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
    """`payload` is copied."""
    return chunk_messages(b"", cut([bytes(payload)], most))


@dataclass(slots=True)
class _Unfinished:
    """Not all chunks have arrived."""

    topic: str
    number: int
    """`Body.number`."""
    count: int
    size: int
    """Announced length of the whole payload."""
    payload: bytearray = field(default_factory=bytearray)
    """Grows as chunks arrive."""
    following: int = 0
    """Index of the next chunk."""
    filled: int = 0

    def room(self, size: int) -> memoryview:
        """Return a view of the buffer for the next `size` bytes."""
        end = self.filled + size
        if end > len(self.payload):
            grown = bytearray(min(self.size, _GROWTH * end))
            grown[: self.filled] = memoryview(self.payload)[: self.filled]
            self.payload = grown
        return memoryview(self.payload)[self.filled : end]


@dataclass(slots=True)
class Joiner:
    """One payload per sender at a time. The last level of a topic is the sender's name. (A correct
    sender finishes a payload before it sends the next one, even on another topic.)"""

    most: Callable[[str], int]
    """Maximum bytes of a payload on a topic. A larger one is dropped."""
    _unfinished: dict[str, _Unfinished] = field(default_factory=dict)

    def add(self, topic: str, message: bytes) -> bytes | bytearray | None:
        """Return the payload if it is complete now; None if chunks are missing, or the message is
        dropped. A message that is not a chunk is a complete payload."""
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
        """Part of the payload's buffer for the `size` bytes of the chunk with this `head`, which the
        caller fills, then calls `filled`. None if the chunk does not continue a payload, or the payload
        is too large."""
        _, sender = Topics.split(topic)
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
            return None  # the chunk is repeated, or an earlier chunk was lost
        if found.filled + size > found.size:
            del self._unfinished[sender]
            return None
        return found.room(size)

    def filled(self, topic: str, size: int) -> bytearray | None:
        """`size` bytes are in the view that `place` returned. Return the payload if it is complete
        now."""
        _, sender = Topics.split(topic)
        found = self._unfinished[sender]
        found.filled += size
        found.following += 1
        if found.following < found.count:
            return None
        del self._unfinished[sender]
        return found.payload if found.filled == found.size else None


def is_chunk(message: bytes | bytearray) -> bool:
    """`message` may be only its beginning."""
    return message.startswith(_MAGIC)
