"""What an aggregator begins with: all that its core is made of, and can be made of again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import SeedSequence

from agents.aggregator.core import AggregatorCore, Settings
from agents.config import Named
from agents.rules import RULES
from agents.rules.interface import Rule, Server
from agents.vectors import Vector


@dataclass(frozen=True, slots=True)
class Beginning:
    """With the same model and the same inputs, two cores of it do the same to the last bit."""

    settings: Settings
    rule: Named
    seed: int
    version: int = 0
    """Of the first model; of a resumed run, the last version that was made."""

    def core(self, w: Vector) -> tuple[AggregatorCore, Server]:
        """A core that begins with the model `w`, shape (d,), and will change it; and its server."""
        rule: Rule = RULES[self.rule.name](**self.rule.params)
        rng = np.random.default_rng(SeedSequence(self.seed, spawn_key=(0, self.version)))
        server = Server(w, {}, rng, self.version, population=self.settings.importance)
        return AggregatorCore(self.settings, rule.begin(server), server), server
