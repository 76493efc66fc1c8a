"""Attacks: what a client whose group is `byzantine` makes of its honest training before it sends it.

Each changes the progress Δ = end − start of one training (of a rule that wants gradients, the gradient);
the rest of the message stays as an honest client says it. To add one: a class, and a line in ATTACKS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np

from agents.client.randomness import ATTACKING
from agents.models.vectors import Vector
from agents.pipeline.interface import ClientContext, ClientStep, UpdateStep


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


@dataclass(frozen=True)
class ByzantineStep(UpdateStep):
    """The attack of a client."""

    kind: str
    """One of ATTACKS."""
    params: Mapping[str, Any]
    """Of its dataclass."""

    def at_client(self, client: ClientContext) -> Attacker:
        return Attacker(ATTACKS[self.kind](**self.params), partial(client.rng, ATTACKING))


class Attacker(ClientStep):
    """One client's attack over its life. `rng` makes the generator of update `sequence`."""

    before_rule: ClassVar[bool] = True

    def __init__(self, attack: Attack, rng: Callable[[int], np.random.Generator]) -> None:
        self._attack, self._rng = attack, rng
        self._first: Vector | None = None

    def apply(self, progress: Vector, sequence: int, dispatch: int) -> Vector:
        if self._first is None:
            self._first = progress
        return self._attack.forge(progress, self._first, lambda: self._rng(sequence))
