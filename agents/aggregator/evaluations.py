"""Requested evaluations of the global model. No I/O and no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from agents import events
from agents.aggregator.actions import Action, Evaluate, Log
from agents.aggregator.inputs import EvaluationDone, PartEvaluated
from agents.models.vectors import Vector, finite
from agents.timing.nanoseconds import Nanoseconds, to_seconds

_DIVERGED = (
    "is not finite, or its norm is above 1.8e19: training from it is useless. The updates were finite, "
    "so the rule has made it diverge"
)


class Evaluations:
    """`several`: an evaluation may be requested before the previous one is done."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._taken: deque[Nanoseconds] = deque()
        """Device times at which the unfinished ones were requested."""
        self._newest = -1
        """−1 if no evaluation was requested."""
        self._diverged = False
        """An evaluated model was not finite."""

    def __len__(self) -> int:
        return len(self._taken)

    def remaining(self, version: int) -> int:
        """Evaluations that are still to be done if the run ends with `version`."""
        return len(self._taken) + (version != self._newest)

    def request(self, version: int, w: Vector, at: Nanoseconds) -> list[Action]:
        """`w`: shape (d,). Do nothing while the last evaluation is still running, or if the model has
        not changed."""
        if (self._taken and not self._several) or version == self._newest:
            return []
        self._taken.append(at)
        self._newest = version
        if self._diverged or finite(w):
            return [Evaluate(version)]
        self._diverged = True
        note = events.Note(to_seconds(at), f"version {version} of the model {_DIVERGED}")
        return [Log(note), Evaluate(version)]

    def part(self, event: PartEvaluated) -> Log:
        """The event belongs to the oldest unfinished evaluation."""
        return Log(
            events.EvaluatedPart(
                to_seconds(self._oldest),
                event.version,
                event.part,
                event.name,
                event.samples,
                event.loss,
                event.accuracy,
            )
        )

    def done(self, event: EvaluationDone) -> Log:
        taken = to_seconds(self._oldest)
        self._taken.popleft()
        return Log(events.Evaluated(taken, event.version, event.loss, event.accuracy))

    @property
    def _oldest(self) -> Nanoseconds:
        """Raises RuntimeError if there is no unfinished evaluation."""
        if not self._taken:
            raise RuntimeError("this evaluation was not requested")
        return self._taken[0]

    def problems(self, version: int) -> Iterator[str]:
        """`version`: the newest."""
        if self._newest > version:
            yield f"version {self._newest} is evaluated, and {version} is the newest"
        if [*self._taken] != sorted(self._taken):
            yield f"models that are evaluated were taken at {self._taken}"
