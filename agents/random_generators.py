"""Random generators of a run, by name and purpose, so that the draws are independent of each other."""

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


TRAINING, THINKING, TIMING, ATTACKING, ROUNDING, NOISE = 1, 2, 3, 4, 5, 6
"""TRAINING (mini-batches), ATTACKING and ROUNDING have one generator per training, by its sequence
number; NOISE one per update, by the dispatch that it answers. THINKING and TIMING have one per client,
whose k-th draw belongs to the k-th training that was begun (`agents.client.factory`)."""


def client_generator(seed: int, client: str, *purpose: int) -> np.random.Generator:
    """`purpose`: one of this module's, and the number of the training or update if it has a generator
    for each."""
    key = (*key_of(client), *purpose)
    return np.random.default_rng(SeedSequence(seed, spawn_key=key))
