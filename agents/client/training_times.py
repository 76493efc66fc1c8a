"""How long a client's trainings take at least, and how long it thinks after each. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from agents.client.randomness import THINKING, TIMING
from agents.config import RandomDuration
from agents.timing import durations
from agents.timing.nanoseconds import Nanoseconds, from_seconds


class Timing:
    """Durations of one client's trainings in a run.

    Each training that begins takes the next value of `timing` and of `think`, also one that is done
    again after a crash: with the same value, a long one would be begun until no crash comes during it.
    `rng` makes the generator for a purpose; `begun` is how many trainings the client's former processes
    began.
    """

    def __init__(
        self,
        timing: RandomDuration | None,
        think: RandomDuration | None,
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
        """Least time from when the training could begin to its end, of the newest training."""
        self.thinking: Nanoseconds = 0
        """Time from its end to when its update is sent, of the newest training."""
        for _ in range(begun):
            self.begin()

    def begin(self) -> None:
        """A training begins: draw its durations."""
        if self._timing is not None:
            self.floor = from_seconds(self._timing() / self._speed)
        if self._think is not None:
            self.thinking = from_seconds(self._think())
