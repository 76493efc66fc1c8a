"""The global random generators that a model's code may draw from: torch's, NumPy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_BITS = 32
"""NumPy's global generator takes seeds of at most this length."""


def seed(value: int) -> None:
    """Seed all global generators with `value`, from 0 to 2⁶³ − 1."""
    torch.default_generator.manual_seed(value)
    np.random.seed(value % (1 << _BITS))
    random.seed(value)


def states() -> tuple[Any, ...]:
    """Can be compared with ==."""
    name, key, *rest = np.random.get_state(legacy=True)
    return (
        bytes(torch.get_rng_state().numpy()),
        name,
        np.asarray(key).tobytes(),
        *rest,
        random.getstate(),
    )


@contextmanager
def unchanged() -> Iterator[None]:
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
