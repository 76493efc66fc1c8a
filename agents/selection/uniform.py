"""Uniform selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agents.selection.interface import ClientSelection, Draw, ServerView


@dataclass(frozen=True)
class UniformSelection(ClientSelection):
    """Each rule draws uniformly in its own way, as its paper says. Runs without `selection` draw the
    same clients, but do not record the draws."""

    def choose(self, draw: Draw, view: ServerView, rng: np.random.Generator) -> Sequence[str]:
        return draw.uniform(rng)
