"""Construction of a client's core and its parts from a `ClientSetup`, for every runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agents import random_generators, user_code
from agents.client.core import FIT_MEMORY, ClientCore, ClientIdentity
from agents.config import ClientSetup, DrawnDuration
from agents.pipeline.interface import ClientContext, ClientStep
from agents.pipeline.steps import build_client_steps
from agents.random_generators import THINKING, TIMING
from agents.rules import RULES
from agents.rules.client_half import ClientSettings, KeptMemory, SavedVectors
from agents.rules.interface import Rule
from agents.timing import durations
from agents.timing.nanoseconds import Nanoseconds, from_seconds


class Timing:
    """`timing`: minimum duration of a training, before it is divided by `speed`. `think`: pause between
    its end and the sending of its update. Both are 0 if None. `rng`: generator for the minimum durations
    (TIMING) or for the pauses (THINKING). `begun`: trainings that earlier processes of the client began.

    Each training draws new values when it begins, also one that is repeated after a crash: with the old
    values, a long training might never end between two crashes.
    """

    def __init__(
        self,
        timing: DrawnDuration | None,
        think: DrawnDuration | None,
        rng: Callable[[int], np.random.Generator],
        *,
        speed: float = 1.0,
        begun: int = 0,
    ) -> None:
        self._speed = speed
        self._timing, self._think = (
            None if duration is None else durations.sampler(duration, rng(purpose))
            for duration, purpose in ((timing, TIMING), (think, THINKING))
        )
        self.floor: Nanoseconds = 0
        """Minimum duration of the newest training, from when it could begin."""
        self.thinking: Nanoseconds = 0
        """Nanoseconds between the end of the newest training and the sending of its update."""
        for _ in range(begun):
            self.begin()

    def begin(self) -> None:
        if self._timing is not None:
            self.floor = from_seconds(self._timing() / self._speed)
        if self._think is not None:
            self.thinking = from_seconds(self._think())


def rng(setup: ClientSetup, *purpose: int) -> np.random.Generator:
    """`agents.random_generators` lists the purposes."""
    return random_generators.client_generator(setup.seed, setup.client, *purpose)


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
    return build_client_steps(setup.steps, client)


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
