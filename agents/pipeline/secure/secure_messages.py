"""Messages of secure aggregation beside the masked updates: fixed heads, then bytes of a length that
the run fixes. What does not fit is refused before any of it is used."""

from __future__ import annotations

import struct

import numpy as np

from agents.pipeline.secure.field import FIELD, Words

SEAL_BYTES = 12 + 16
"""Nonce and tag, that a sealed share has beside its content (`agents.pipeline.secure.channels`)."""
_SHARE = struct.Struct("<4sQ")
_SUM = struct.Struct("<4sQI")
_SHARE_MAGIC, _SUM_MAGIC = b"shr1", b"sum1"
LACKING = 0
"""Length of the sum of one who cannot make it."""


class SecureWireError(Exception):
    """No message of this protocol; the text says why."""


def share_size(length: int) -> int:
    """Bytes of the message with a share of so many elements."""
    return _SHARE.size + 4 * length + SEAL_BYTES


def sum_size(length: int) -> int:
    """Bytes of the message with a sum of shares of so many elements."""
    return _SUM.size + 4 * length


def encode_share(dispatch: int, sealed: bytes) -> bytes:
    """A sealed share of the mask of the update that will answer `dispatch`."""
    return _SHARE.pack(_SHARE_MAGIC, dispatch) + sealed


def decode_share(payload: bytes | bytearray, length: int) -> tuple[int, bytes]:
    """Dispatch and sealed share. Raises SecureWireError."""
    if len(payload) != share_size(length):
        raise SecureWireError(f"{len(payload)} bytes, a share has {share_size(length)}")
    magic, dispatch = _SHARE.unpack_from(payload)
    if magic != _SHARE_MAGIC:
        raise SecureWireError("it does not begin like a share")
    return dispatch, bytes(payload[_SHARE.size :])


def encode_sum(number: int, words: Words | None) -> bytes:
    """The weighted sum of shares that request `number` is about; None where it cannot be made."""
    body = b"" if words is None else np.ascontiguousarray(words, "<u4").tobytes()
    return _SUM.pack(_SUM_MAGIC, number, len(body) // 4) + body


def decode_sum(payload: bytes | bytearray) -> tuple[int, Words | None]:
    """Number and sum, of any length. Raises SecureWireError."""
    if len(payload) < _SUM.size:
        raise SecureWireError("shorter than a head")
    magic, number, count = _SUM.unpack_from(payload)
    if magic != _SUM_MAGIC or sum_size(count) != len(payload):
        raise SecureWireError("it does not begin like a sum of shares")
    if count == LACKING:
        return number, None
    return number, elements(np.frombuffer(payload, "<u4", count, _SUM.size))


def elements(words: Words) -> Words:
    """`words`, where all of them are elements of the field. Raises SecureWireError."""
    if words.size and int(words.max()) >= FIELD.p:
        raise SecureWireError("a word that is not below p")
    return words
