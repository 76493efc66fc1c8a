"""Differential privacy at the client: what is sent in place of an update. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from agents.config import Differential
from agents.models.vectors import Vector, norm


@dataclass(frozen=True, slots=True)
class Privatiser:
    """One client's clipping and noise; `rng` makes the generator of the update that answers
    a dispatch. (No two updates of a run answer the same one, also where the client was started again
    between them; with the same noise, their difference would have none.)"""

    settings: Differential
    rng: Callable[[int], np.random.Generator]
    step: float = 0.0
    """To multiples of this a coordinate is rounded afterwards, up or down (secure aggregation); 0: to
    none."""

    @property
    def hides_loss(self) -> bool:
        """Whether the local loss, which has no noise, must not be sent: the server is not trusted."""
        return self.settings.at == "client"

    def private(self, dispatch: int, change: Vector) -> Vector:
        """min(1, C/‖Δ‖) Δ, at the client with noise N(0, (zC)²) in each coordinate. Shape (d,),
        float32. Without the noise it is at most C long, to the last bit; with noise at the server also
        once it is rounded."""
        bound = self.settings.clip
        if self.settings.at == "server":
            bound -= lengthening(self.step, change.size)
        length = norm(change)
        private: Vector = change.astype(np.float32)
        if not math.isfinite(length):
            private.fill(np.nan)  # nothing of what diverged can be clipped, so nothing of it is told
        elif length > bound:
            private *= _below(bound / length)
        if self.settings.at == "client":
            noise = self.rng(dispatch).standard_normal(private.size, np.float32)
            noise *= np.float32(self.settings.noise * bound)
            private += noise
        return private


def _below(factor: float) -> np.float32:
    """A factor that makes an element, once it is rounded to float32, at most `factor` times as large."""
    none = np.float32(0)
    below: np.float32 = np.nextafter(np.nextafter(np.float32(factor), none), none)
    return below


def lengthening(step: float, size: int) -> float:
    """By how much rounding to multiples of `step` may lengthen a vector of shape (size,), in ℓ2."""
    return step * math.sqrt(size)
