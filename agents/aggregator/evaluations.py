"""Which models are to be evaluated, and how many of these evaluations are not done. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from agents import events
from agents.aggregator.actions import Action, Evaluate, Log
from agents.aggregator.inputs import EvaluationDone, PartEvaluated
from agents.models.vectors import Vector, finite
from agents.timing.nanoseconds import Nanoseconds, to_seconds

_DIVERGED = (
    "is not finite, or its norm is above 1.8e19: nothing that is trained from it is of use. The updates "
    "were finite, so it is what the rule makes of them"
)


class Evaluations:
    """They are done in the order of their requests. With `several`, there may be one before another is
    done."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._taken: deque[Nanoseconds] = deque()
        """When the models were taken of those that are not done."""
        self._newest = -1
        """The last version whose evaluation was requested."""
        self._diverged = False
        """Whether an evaluated model was not finite."""

    def __len__(self) -> int:
        """How many are not done."""
        return len(self._taken)

    def left(self, version: int) -> int:
        """How many are to be done yet where the run ends with `version`."""
        return len(self._taken) + (version != self._newest)

    def request(self, version: int, w: Vector, at: Nanoseconds) -> list[Action]:
        """Have the model `w`, shape (d,), evaluated as it is now, unless the last evaluation is still
        going or nothing changed since."""
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
        """The record of a part of the evaluation that is done next."""
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
        """One is done; its record."""
        taken = to_seconds(self._oldest)
        self._taken.popleft()
        return Log(events.Evaluated(taken, event.version, event.loss, event.accuracy))

    @property
    def _oldest(self) -> Nanoseconds:
        """When the model was taken whose evaluation is done next."""
        if not self._taken:
            raise RuntimeError("an evaluation that was not requested")
        return self._taken[0]

    def problems(self, version: int) -> Iterator[str]:
        """Describe what is impossible in this state, with a model of `version`."""
        if self._newest > version:
            yield f"version {self._newest} is evaluated, and {version} is the newest"
        if [*self._taken] != sorted(self._taken):
            yield f"models that are evaluated were taken at {self._taken}"
