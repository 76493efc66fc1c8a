"""Random generators. There is one per device and purpose, so that the draws are independent of each
other."""

from __future__ import annotations

import numpy as np
from numpy.random import SeedSequence

from agents import generator_keys


def generator(seed: int, device: str, purpose: str) -> np.random.Generator:
    """Return a generator that depends only on the arguments. Different arguments give independent
    generators."""
    key = *generator_keys.key_of(device), *generator_keys.key_of(purpose)
    return np.random.default_rng(SeedSequence(seed, spawn_key=key))
