"""Differential privacy: clipping and noise at the client, or noise at the server. No I/O and no
clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np
from numpy.random import SeedSequence

from agents.config import Positive
from agents.models.vectors import Vector, add_scaled, norm
from agents.pipeline.interface import ClientContext, ClientStep, ServerStep, UpdateStep
from agents.random_generators import NOISE


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentialPrivacy:
    """Differential privacy of each client (docs/concepts/privacy.md): its updates are clipped, and
    Gaussian noise is added."""

    clip: Positive
    """C, maximum ℓ2 norm of an update; longer updates are scaled down to it."""
    noise: Positive
    """z, noise multiplier: the noise has standard deviation z·C in each coordinate."""
    at: Literal["client", "server"] = "client"
    """Place where noise is added. client: to each update before it is sent. server: once to the sum of
    each buffer, scaled by the largest weight of an update. This requires a trusted server."""
    delta: Annotated[float, "below 1"] = 1e-5
    """δ at which ε is reported."""

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ValueError(f"delta is {self.delta:g}, expected above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentialRun(DifferentialPrivacy, UpdateStep):
    """Step that applies the differential privacy of one run."""

    seed: int
    """Seed of the noise at the server."""
    rounding: float = 0.0
    """A later step rounds each coordinate up or down to a multiple of this value; 0 if none does."""

    def at_client(self, client: ClientContext) -> Privatiser:
        return Privatiser(self, partial(client.rng, NOISE))

    def at_server(self, parameters: int) -> NoiseAtServer | None:
        return NoiseAtServer(self.noise * self.clip, self.seed) if self.at == "server" else None


class Privatiser(ClientStep):
    """Clipping and noise of one client. `rng`: generator of the update that answers a dispatch.

    Two updates of a run never answer the same dispatch, even after a restart of the client. So no two
    have equal noise, which would reveal their exact difference.
    """

    def __init__(self, settings: DifferentialRun, rng: Callable[[int], np.random.Generator]) -> None:
        self._settings, self._rng = settings, rng
        self.hides_loss = settings.at == "client"  # the loss has no noise

    def apply(self, progress: Vector, sequence: int, dispatch: int) -> Vector:
        """min(1, C/‖Δ‖) Δ, shape (d,), float32, plus noise N(0, (zC)²) in each coordinate if that is
        added at the client. If it is added at the server, the norm never exceeds C, even after
        rounding."""
        settings = self._settings
        bound = settings.clip
        if settings.at == "server":
            bound -= rounding_growth(settings.rounding, progress.size)
        length = norm(progress)
        private: Vector = progress.astype(np.float32)
        if not math.isfinite(length):
            private.fill(np.nan)  # a diverged update cannot be clipped, so it reveals nothing
        elif length > bound:
            private *= _round_down(bound / length)
        if settings.at == "client":
            noise = self._rng(dispatch).standard_normal(private.size, np.float32)
            noise *= np.float32(settings.noise * bound)
            private += noise
        return private


class NoiseAtServer(ServerStep):
    """Noise at the server, with standard deviation `std` in each coordinate per unit of weight."""

    def __init__(self, std: float, seed: int) -> None:
        self._std, self._seed = std, seed

    def add_noise(self, w: Vector, version: int, weight: float) -> None:
        """Add weight · N(0, std²) to `w`, in place. It depends only on the seed and the version."""
        rng = np.random.default_rng(SeedSequence(self._seed, spawn_key=(0, 1, version)))
        drawn = rng.standard_normal(w.size, np.float32)
        add_scaled(w, drawn, weight * self._std)


def _round_down(factor: float) -> np.float32:
    """Slightly below `factor`: an element times this number, rounded to float32, has at most `factor`
    times the element's magnitude."""
    none = np.float32(0)
    below: np.float32 = np.nextafter(np.nextafter(np.float32(factor), none), none)
    return below


def rounding_growth(step: float, size: int) -> float:
    """Maximum increase of a vector's ℓ2 norm if its `size` elements are rounded to multiples of
    `step`."""
    return step * math.sqrt(size)
