"""Messages of secure aggregation: masked updates, shares of masks, and sums of shares."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from agents.secure.arithmetic import FIELD, Words
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.payloads import Encoded

SEAL_BYTES = 12 + 16
"""Nonce and tag that sealing adds to a share (`agents.secure.party`)."""
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


HOLDERS = "holders"
"""Marks a masked update in the header."""
DIVERGED = -1
"""`outside` of an update that cannot be rounded, because training diverged."""
_MAX_HOLDERS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """Hidden by a mask: only sums of such updates can be read."""

    words: Words
    """Rounded update plus mask, shape (d,); for an update of kind `model`, the rounded difference to the
    model that it was trained from, plus the mask. Received words may be p or more until they have been
    checked."""
    holders: tuple[int, ...]
    """Clients that were sent a share of the mask, as indices into the run's list."""
    outside: int
    """Coordinates that were clipped to the range; DIVERGED, without usable `words`, if the update could
    not be rounded."""
    took: Nanoseconds = 0
    """Nanoseconds from the start of making the mask until its shares were sent."""

    @property
    def encoded(self) -> Encoded:
        """Header fields and array, as they are sent."""
        numbers = {"outside": str(self.outside), "took": str(self.took)}
        words = np.ascontiguousarray(self.words, "<u4")
        return Encoded({HOLDERS: bits_of(self.holders), **numbers}, {"masked": words})

    @classmethod
    def from_encoded(cls, encoded: Encoded) -> Masked:
        """Raises ValueError."""
        fields, arrays = encoded.fields, encoded.arrays
        if fields.keys() != {HOLDERS, "outside", "took"} or [*arrays] != ["masked"]:
            raise ValueError(
                f"unexpected fields {', '.join(fields):.80} or arrays {', '.join(arrays):.80}"
            )
        if (words := arrays["masked"]).dtype != np.dtype("<u4"):
            raise ValueError(f"words of type {words.dtype}, expected uint32")
        return cls(words, holders_of(fields[HOLDERS]), int(fields["outside"]), int(fields["took"]))


def bits_of(holders: Iterable[int]) -> str:
    """Hexadecimal number with one bit set per holder."""
    return f"{sum(1 << holder for holder in holders):x}"


def holders_of(bits: str) -> tuple[int, ...]:
    """Inverse of `bits_of`. Raises ValueError."""
    if not 0 < len(bits) <= _MAX_HOLDERS // 4 or not set(bits) <= set("0123456789abcdef"):
        raise ValueError("holders: expected a hexadecimal number")
    number = int(bits, 16)
    return tuple(place for place in range(number.bit_length()) if number >> place & 1)
