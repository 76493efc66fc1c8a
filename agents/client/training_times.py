"""Minimum durations of a client's trainings, and thinking times after the trainings. No I/O and no
clock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from agents.client.randomness import THINKING, TIMING
from agents.config import DrawnDuration
from agents.timing import durations
from agents.timing.nanoseconds import Nanoseconds, from_seconds


class Timing:
    """Durations of one client's trainings in a run.

    `timing`: minimum duration of a training, before it is divided by `speed`. `think`: pause between the
    end of a training and the sending of its update. If `timing` or `think` is None, its values are 0.
    `rng`: function that returns the random generator for the minimum durations (argument TIMING) or for
    the pauses (argument THINKING). `begun`: number of trainings that earlier processes of the client
    began.

    Each training draws a new value of `timing` and of `think` when it begins. A training that is
    repeated after a crash draws new values, too: with the old values, a long training might never end
    between two crashes.
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
        """Minimum duration in nanoseconds of the newest training, measured from the time at which the
        training could begin."""
        self.thinking: Nanoseconds = 0
        """Nanoseconds between the end of the newest training and the sending of its update."""
        for _ in range(begun):
            self.begin()

    def begin(self) -> None:
        """Draw the durations of a training that begins."""
        if self._timing is not None:
            self.floor = from_seconds(self._timing() / self._speed)
        if self._think is not None:
            self.thinking = from_seconds(self._think())
