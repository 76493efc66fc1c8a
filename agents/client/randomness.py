"""A client's own randomness: fixed by run seed, client and purpose, whatever happened before."""

from __future__ import annotations

import numpy as np
from numpy.random import SeedSequence

from agents import generator_keys

TRAINING, THINKING, TIMING, ATTACKING, ROUNDING, NOISE = 1, 2, 3, 4, 5, 6
"""Purposes. The mini-batches of each training have a generator of their own, by its sequence number, and
so has what an attack draws, and the rounding of its update. Its noise has one by the dispatch that it
answers. The durations of all trainings have one, of which the k-th draw is that of the k-th training
begun (`agents.client.training_times`)."""


def generator(seed: int, client: str, *purpose: int) -> np.random.Generator:
    key = (*generator_keys.key_of(client), *purpose)
    return np.random.default_rng(SeedSequence(seed, spawn_key=key))
