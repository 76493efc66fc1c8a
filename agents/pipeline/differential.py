"""Differential privacy: clipping and noise at the client, or noise at the server. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np
from numpy.random import SeedSequence

from agents.client.randomness import NOISE
from agents.config import Positive
from agents.models.vectors import Vector, add_scaled, norm
from agents.pipeline.interface import ClientContext, ClientStep, ServerStep, UpdateStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Differential:
    """Differential privacy of each client: its updates are clipped, and Gaussian noise is added
    (docs/concepts/privacy.md)."""

    clip: Positive
    """C, upper bound of the ℓ2 norm of an update."""
    noise: Positive
    """z: noise of standard deviation zC in each coordinate."""
    at: Literal["client", "server"] = "client"
    """client: on each update, before it is sent. server: once per buffer, on the sum, scaled like the
    update with the largest weight; the server is trusted then."""
    delta: Annotated[float, "below 1"] = 1e-5
    """δ, for which ε is told."""

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ValueError(f"delta is {self.delta:g}, expected above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentialRun(Differential, UpdateStep):
    """Differential privacy of one run."""

    seed: int
    """Of the noise at the server."""
    rounding: float = 0.0
    """To multiples of this a coordinate is rounded afterwards, up or down (secure aggregation); 0: to
    none."""

    def at_client(self, client: ClientContext) -> Privatiser:
        return Privatiser(self, partial(client.rng, NOISE))

    def at_server(self, parameters: int) -> NoiseAtServer | None:
        return NoiseAtServer(self.noise * self.clip, self.seed) if self.at == "server" else None


class Privatiser(ClientStep):
    """One client's clipping and noise; `rng` makes the generator of the update that answers a dispatch.
    (No two updates of a run answer the same one, also where the client was started again between them;
    with the same noise, their difference would have none.)"""

    def __init__(self, settings: DifferentialRun, rng: Callable[[int], np.random.Generator]) -> None:
        self._settings, self._rng = settings, rng
        self.hides_loss = settings.at == "client"  # it has no noise

    def apply(self, progress: Vector, sequence: int, dispatch: int) -> Vector:
        """min(1, C/‖Δ‖) Δ, at the client with noise N(0, (zC)²) in each coordinate. Shape (d,),
        float32. Without the noise it is at most C long, to the last bit; with noise at the server also
        once it is rounded."""
        settings = self._settings
        bound = settings.clip
        if settings.at == "server":
            bound -= lengthening(settings.rounding, progress.size)
        length = norm(progress)
        private: Vector = progress.astype(np.float32)
        if not math.isfinite(length):
            private.fill(np.nan)  # nothing of what diverged can be clipped, so nothing of it is told
        elif length > bound:
            private *= _below(bound / length)
        if settings.at == "client":
            noise = self._rng(dispatch).standard_normal(private.size, np.float32)
            noise *= np.float32(settings.noise * bound)
            private += noise
        return private


class NoiseAtServer(ServerStep):
    """Noise of standard deviation `std` in each coordinate, of an update of weight 1."""

    def __init__(self, std: float, seed: int) -> None:
        self._std, self._seed = std, seed

    def add_noise(self, w: Vector, version: int, weight: float) -> None:
        """w ← w + weight · N(0, std²); what is drawn follows from the version."""
        rng = np.random.default_rng(SeedSequence(self._seed, spawn_key=(0, 1, version)))
        drawn = rng.standard_normal(w.size, np.float32)
        add_scaled(w, drawn, weight * self._std)


def _below(factor: float) -> np.float32:
    """A factor that makes an element, once it is rounded to float32, at most `factor` times as large."""
    none = np.float32(0)
    below: np.float32 = np.nextafter(np.nextafter(np.float32(factor), none), none)
    return below


def lengthening(step: float, size: int) -> float:
    """By how much rounding to multiples of `step` may lengthen a vector of shape (size,), in ℓ2."""
    return step * math.sqrt(size)
