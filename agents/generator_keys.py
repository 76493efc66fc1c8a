"""Random generators by name and purpose, whose draws are independent of each other."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.random import SeedSequence

_BYTES = 16
"""Bytes of the hash that are used. A short checksum such as CRC-32 is not sufficient: it is easy to find
two names with equal ones."""


@functools.lru_cache(maxsize=2**14)
def key_of(name: str) -> tuple[int, ...]:
    """Four 32-bit words from a hash, for the spawn key of a random generator."""
    digest = hashlib.sha256(name.encode()).digest()[:_BYTES]
    return tuple(np.frombuffer(digest, "<u4").tolist())


def generator(seed: int, name: str, purpose: str) -> np.random.Generator:
    """Different arguments give independent generators."""
    return np.random.default_rng(SeedSequence(seed, spawn_key=(*key_of(name), *key_of(purpose))))
