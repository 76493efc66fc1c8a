"""Attacks: what a client whose group is `byzantine` makes of its honest training before it sends it.

Each changes the progress Δ = end − start of one training (of a rule that wants gradients, the gradient);
the rest of the message stays as an honest client says it. To add one: a class, and a line in ATTACKS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np

from agents.config import Named
from agents.models.vectors import Vector


class Attack(Protocol):
    """The parameters of an attack: a frozen dataclass whose fields are what a topology may set."""

    def forge(self, progress: Vector, first: Vector, rng: Callable[[], np.random.Generator]) -> Vector:
        """What is sent in place of `progress`, shape (d,), float32. `first` is the client's first
        progress since its process started; `rng` makes the generator of this update."""


@dataclass(frozen=True)
class SignFlip:
    """Δ ← −a Δ."""

    factor: Annotated[float, "positive"] = 1.0
    """a."""

    def forge(self, progress: Vector, first: Vector, rng: Callable[[], np.random.Generator]) -> Vector:
        return progress * np.float32(-self.factor)


@dataclass(frozen=True)
class Scale:
    """Δ ← a Δ."""

    factor: Annotated[float, "positive"] = 10.0
    """a."""

    def forge(self, progress: Vector, first: Vector, rng: Callable[[], np.random.Generator]) -> Vector:
        with np.errstate(over="ignore"):  # the aggregator's to judge
            return progress * np.float32(self.factor)


@dataclass(frozen=True)
class Noise:
    """Δ ← Δ + σ z, with z standard normal in each coordinate."""

    std: Annotated[float, "positive"]
    """σ."""

    def forge(self, progress: Vector, first: Vector, rng: Callable[[], np.random.Generator]) -> Vector:
        noise: Vector = rng().standard_normal(progress.size, np.float32)
        noise *= np.float32(self.std)
        noise += progress
        return noise


@dataclass(frozen=True)
class StaleReplay:
    """Δ ← the client's first Δ, time and again. A restart of the client makes it begin anew."""

    def forge(self, progress: Vector, first: Vector, rng: Callable[[], np.random.Generator]) -> Vector:
        return first


ATTACKS: dict[str, type[Attack]] = {
    "sign_flip": SignFlip,
    "noise": Noise,
    "scale": Scale,
    "stale_replay": StaleReplay,
}


class Attacker:
    """One client's attack over its life. `rng` makes the generator of update `sequence`."""

    def __init__(self, named: Named, rng: Callable[[int], np.random.Generator]) -> None:
        self._attack: Attack = ATTACKS[named.name](**named.params)
        self._rng = rng
        self._first: Vector | None = None

    def end(self, sequence: int, start: Vector | None, end: Vector) -> Vector:
        """What training `sequence`, from `start` to `end`, shape (d,), is said to have ended at. Without
        `start`, `end` is a gradient."""
        progress = end if start is None else end - start
        if self._first is None:
            self._first = progress
        forged = self._attack.forge(progress, self._first, lambda: self._rng(sequence))
        return forged if start is None else start + forged
