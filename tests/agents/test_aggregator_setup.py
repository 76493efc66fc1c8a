"""A rule's draws follow from the seed alone, in later versions of the project too."""

from __future__ import annotations

import numpy as np

from agents.aggregator.core import Setup
from agents.aggregator.inputs import Settings
from agents.config import Named, StopConditions
from agents.rules.interface import ClientSide


def test_draws_of_a_rule_depend_on_the_seed() -> None:
    settings = Settings(
        run="run",
        schema="s",
        side=ClientSide(),
        importance={"a": 0.25, "b": 0.75},
        stop=StopConditions(updates=3),
        evaluate_every=1_000_000_000,
    )
    _, server = Setup(settings, Named("fedbuff", {"buffer_size": 1}), 7).core(np.zeros(2))
    assert server.rng.integers(0, 1000, 4).tolist() == [848, 392, 804, 152]
    assert (server.version, server.clients) == (0, {})
    assert server.population == {"a": 0.25, "b": 0.75}
