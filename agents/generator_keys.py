"""Names as keys of random generators."""

from __future__ import annotations

import hashlib

import numpy as np

_BYTES = 16
"""Of the hash. A checksum would be too short: names with equal CRC-32 are found in no time."""


def key_of(name: str) -> tuple[int, ...]:
    """The words of 32 bits that stand for `name` in the key of a generator: as many for every name, and
    others for another name."""
    digest = hashlib.sha256(name.encode()).digest()[:_BYTES]
    return tuple(np.frombuffer(digest, "<u4").tolist())
