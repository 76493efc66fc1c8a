"""Random generators of a client. A generator is determined by the run's seed, the client's name and a
purpose."""

from __future__ import annotations

import numpy as np
from numpy.random import SeedSequence

from agents import generator_keys

TRAINING, THINKING, TIMING, ATTACKING, ROUNDING, NOISE = 1, 2, 3, 4, 5, 6
"""Purposes of the generators. TRAINING (mini-batches), ATTACKING and ROUNDING have one generator per
training, identified by the training's sequence number. NOISE has one generator per update, identified by
the number of the dispatch that the update answers. THINKING and TIMING have one generator per client,
whose k-th draw belongs to the k-th training that was begun (`agents.client.training_times`)."""


def generator(seed: int, client: str, *purpose: int) -> np.random.Generator:
    """Return the generator of `client` for `purpose`. The first element of `purpose` is one of this
    module's purposes. If this purpose has one generator per training or update, the second element is
    the number that identifies the generator."""
    key = (*generator_keys.key_of(client), *purpose)
    return np.random.default_rng(SeedSequence(seed, spawn_key=key))
