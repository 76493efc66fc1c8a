"""Uniform elements of the field from a short secret, by AES-128 in counter mode."""

from __future__ import annotations

import secrets

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from agents.pipeline.secure.field import FIELD, Field, Words

SEED_BYTES = 16
_ZEROS = bytes(1 << 16)


def new_seed() -> bytes:
    return secrets.token_bytes(SEED_BYTES)


def expand_seed(secret: bytes, count: int, field: Field = FIELD) -> Words:
    """Elements that the same `secret` always gives. Each is the lowest bits, as many as p has, of a
    32-bit word of the key stream. If they equal p, another word is drawn, so that all elements are
    equally likely."""
    stream = Cipher(algorithms.AES128(secret), modes.CTR(bytes(16))).encryptor()
    buffer = bytearray(4 * count + 15)
    at = 0
    while at < 4 * count:
        part = _ZEROS[: min(len(_ZEROS), 4 * count - at)]
        at += stream.update_into(part, memoryview(buffer)[at:])
    words = np.frombuffer(buffer, "<u4", count)
    words &= np.uint32(field.p)
    again = np.flatnonzero(words == field.p)
    while again.size:
        words[again] = np.frombuffer(stream.update(bytes(4 * again.size)), "<u4") & np.uint32(field.p)
        again = again[words[again] == field.p]
    return words
