"""A client's random generators, determined by the run's seed, the client's name and a purpose."""

from __future__ import annotations

import numpy as np
from numpy.random import SeedSequence

from agents import generator_keys

TRAINING, THINKING, TIMING, ATTACKING, ROUNDING, NOISE = 1, 2, 3, 4, 5, 6
"""TRAINING (mini-batches), ATTACKING and ROUNDING have one generator per training, by its sequence
number; NOISE one per update, by the dispatch that it answers. THINKING and TIMING have one per client,
whose k-th draw belongs to the k-th training that was begun (`agents.client.training_times`)."""


def generator(seed: int, client: str, *purpose: int) -> np.random.Generator:
    """`purpose`: one of this module's, and the number of the training or update if it has a generator
    for each."""
    key = (*generator_keys.key_of(client), *purpose)
    return np.random.default_rng(SeedSequence(seed, spawn_key=key))
