"""Attacks: how a client of a `byzantine` group forges its update.

Each attack changes the progress Δ = end − start of one training (or the gradient, if the rule uses
gradients). The other fields of the message stay honest. To add an attack, write a class and add a row to
ATTACKS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np

from agents.models.vectors import Vector
from agents.pipeline.interface import ClientContext, ClientStep, UpdateStep
from agents.random_generators import ATTACKING


class Attack(Protocol):
    """An attack: a frozen dataclass whose fields are the keys that a topology may set."""

    def forge(self, progress: Vector, first: Vector, rng: Callable[[], np.random.Generator]) -> Vector:
        """Return the forged progress that replaces `progress`, shape (d,), float32. `first` is the
        client's first progress since its process started; `rng` returns the generator of this update."""


@dataclass(frozen=True)
class SignFlip:
    """Send −a·Δ instead of Δ."""

    factor: Annotated[float, "positive"] = 1.0
    """a, factor of the reversed update."""

    def forge(self, progress: Vector, first: Vector, rng: Callable[[], np.random.Generator]) -> Vector:
        return progress * np.float32(-self.factor)


@dataclass(frozen=True)
class Scale:
    """Send a·Δ instead of Δ."""

    factor: Annotated[float, "positive"] = 10.0
    """a, factor of the update."""

    def forge(self, progress: Vector, first: Vector, rng: Callable[[], np.random.Generator]) -> Vector:
        with np.errstate(over="ignore"):  # the aggregator rejects an infinite update
            return progress * np.float32(self.factor)


@dataclass(frozen=True)
class Noise:
    """Send Δ + σ·z instead of Δ, with z standard normal in each coordinate."""

    std: Annotated[float, "positive"]
    """σ, standard deviation of the noise in each coordinate."""

    def forge(self, progress: Vector, first: Vector, rng: Callable[[], np.random.Generator]) -> Vector:
        noise: Vector = rng().standard_normal(progress.size, np.float32)
        noise *= np.float32(self.std)
        noise += progress
        return noise


@dataclass(frozen=True)
class StaleReplay:
    """Send the first Δ of the client in every update. After a restart of the client's process, the
    first Δ of the new process is used."""

    def forge(self, progress: Vector, first: Vector, rng: Callable[[], np.random.Generator]) -> Vector:
        return first


ATTACKS: dict[str, type[Attack]] = {
    "sign_flip": SignFlip,
    "noise": Noise,
    "scale": Scale,
    "stale_replay": StaleReplay,
}


@dataclass(frozen=True)
class ByzantineStep(UpdateStep):
    """Step that forges a client's updates by an attack."""

    kind: str
    """Name in ATTACKS."""
    params: Mapping[str, Any]
    """Values of the fields of the attack's dataclass."""

    def at_client(self, client: ClientContext) -> Attacker:
        return Attacker(ATTACKS[self.kind](**self.params), partial(client.rng, ATTACKING))


class Attacker(ClientStep):
    """Client half of the attack: forges the updates of one client process. `rng` returns the generator
    of update `sequence`."""

    before_rule: ClassVar[bool] = True

    def __init__(self, attack: Attack, rng: Callable[[int], np.random.Generator]) -> None:
        self._attack, self._rng = attack, rng
        self._first: Vector | None = None

    def apply(self, progress: Vector, sequence: int, dispatch: int) -> Vector:
        if self._first is None:
            self._first = progress
        return self._attack.forge(progress, self._first, lambda: self._rng(sequence))
