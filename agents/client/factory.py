"""A client's core and its parts from a `ClientSetup`, for every runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agents import pipeline, user_code
from agents.client import randomness
from agents.client.core import FIT_MEMORY, ClientCore, ClientIdentity
from agents.client.training_times import Timing
from agents.config import ClientSetup
from agents.pipeline.interface import ClientContext, ClientStep
from agents.rules import RULES
from agents.rules.client_half import ClientSettings, KeptMemory, SavedVectors
from agents.rules.interface import Rule
from agents.timing.nanoseconds import Nanoseconds


def rng(setup: ClientSetup, *purpose: int) -> np.random.Generator:
    """`agents.client.randomness` lists the purposes."""
    return randomness.generator(setup.seed, setup.client, *purpose)


def timing(setup: ClientSetup, begun: int = 0) -> Timing:
    """`begun`: trainings that earlier processes of the client began."""
    return Timing(
        *(setup.timing, setup.think, lambda *purpose: rng(setup, *purpose)),
        speed=setup.speed,
        begun=begun,
    )


def steps(setup: ClientSetup, parameters: int, *, simulated: bool = False) -> list[ClientStep]:
    """`parameters`: of the model. `simulated`: in virtual time."""
    client = ClientContext(
        run=setup.run,
        name=setup.client,
        parameters=parameters,
        rng=lambda *purpose: rng(setup, *purpose),
        simulated=simulated,
    )
    return pipeline.build_client_steps(setup.steps, client)


def core(
    setup: ClientSetup,
    samples: int,
    think: Callable[[Nanoseconds], Nanoseconds],
    steps: Sequence[ClientStep],
    memory: SavedVectors | None = None,
    *,
    fits: bool = False,
) -> ClientCore:
    """`samples`: for training. `memory`: vectors that an earlier process of the client saved. `fits`:
    the task trains with its own `fit`. Raises any exception of user code."""
    own = {name: each for name, each in (memory or {}).items() if name.startswith(FIT_MEMORY)}
    fit_memory = {name.removeprefix(FIT_MEMORY): each for name, each in own.items()}
    after = [step for step in steps if not step.before_rule]
    settings = ClientSettings(
        local=setup.local,
        sends_changes=bool(after),
        as_sent=next((step.as_sent for step in after if step.as_sent is not None), None),
        memory={name: each for name, each in (memory or {}).items() if name not in own},
    )
    rule = user_code.build(setup.rule, RULES, Rule).begin_client(settings)
    return ClientCore(
        ClientIdentity(setup.run, setup.client, samples),
        think,
        rule,
        steps,
        KeptMemory.from_saved(fit_memory) if fits else None,
    )
