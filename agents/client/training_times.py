"""Minimum durations of a client's trainings, and thinking times after them. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from agents.client.randomness import THINKING, TIMING
from agents.config import DrawnDuration
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
