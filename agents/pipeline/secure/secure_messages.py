"""Messages of secure aggregation beside the masked updates: a fixed head, then bytes whose length the
run's settings determine. Any other length is refused."""

from __future__ import annotations

import struct

import numpy as np

from agents.pipeline.secure.field import FIELD, Words

SEAL_BYTES = 12 + 16
"""Nonce and tag that sealing adds to a share (`agents.pipeline.secure.channels`)."""
_SHARE = struct.Struct("<4sQ")
_SUM = struct.Struct("<4sQI")
_SHARE_MAGIC, _SUM_MAGIC = b"shr1", b"sum1"
LACKING = 0
"""Length of the sum if the client cannot make it."""


class SecureWireError(Exception):
    """The text says why the bytes are not a message of this protocol."""


def share_size(length: int) -> int:
    """Bytes of a message with a share of `length` elements."""
    return _SHARE.size + 4 * length + SEAL_BYTES


def sum_size(length: int) -> int:
    """Bytes of a message with a sum of shares of `length` elements."""
    return _SUM.size + 4 * length


def encode_share(dispatch: int, sealed: bytes) -> bytes:
    """Return the message with a sealed share of the mask of the update that will answer `dispatch`."""
    return _SHARE.pack(_SHARE_MAGIC, dispatch) + sealed


def decode_share(payload: bytes | bytearray, length: int) -> tuple[int, bytes]:
    """Dispatch and sealed share. Raises SecureWireError."""
    if len(payload) != share_size(length):
        raise SecureWireError(f"share has {len(payload)} bytes, expected {share_size(length)}")
    magic, dispatch = _SHARE.unpack_from(payload)
    if magic != _SHARE_MAGIC:
        raise SecureWireError("wrong magic number for a share")
    return dispatch, bytes(payload[_SHARE.size :])


def encode_sum(number: int, words: Words | None) -> bytes:
    """`words`: None if the client cannot make the sum."""
    body = b"" if words is None else np.ascontiguousarray(words, "<u4").tobytes()
    return _SUM.pack(_SUM_MAGIC, number, len(body) // 4) + body


def decode_sum(payload: bytes | bytearray) -> tuple[int, Words | None]:
    """Number of the request, and the sum, of any length; None if the client could not make it. Raises
    SecureWireError."""
    if len(payload) < _SUM.size:
        raise SecureWireError(f"message has {len(payload)} bytes, expected at least {_SUM.size}")
    magic, number, count = _SUM.unpack_from(payload)
    if magic != _SUM_MAGIC or sum_size(count) != len(payload):
        raise SecureWireError("wrong magic number or length for a sum of shares")
    if count == LACKING:
        return number, None
    return number, elements(np.frombuffer(payload, "<u4", count, _SUM.size))


def elements(words: Words) -> Words:
    """Raises SecureWireError unless all `words` are elements of the field."""
    if words.size and int(words.max()) >= FIELD.p:
        raise SecureWireError(f"word {int(words.max())} is not below p = {FIELD.p}")
    return words
