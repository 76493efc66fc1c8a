"""Phases of a run, and which inputs the aggregator's core takes in which of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum

from agents.aggregator import inputs
from agents.aggregator.inputs import Input


class RunPhase(IntEnum):
    """Numbers are columns of `REACTIONS`."""

    WAITING = 0
    """Clients report that they are ready; the run clock has not started."""
    RUNNING = 1
    SUSPENDED = 2
    """All processes were started anew, and the run clock stands still until `Started`. Updates that
    clients have kept are taken."""
    ENDED = 3
    """No model is sent any more, and no version is made; the last evaluation is not done."""
    FINISHED = 4
    """All records are written. A run that was cut short can be continued by `Suspended`."""

    def __str__(self) -> str:
        return self.name.lower()

    def __reduce_ex__(self, protocol: object) -> tuple[type[RunPhase], tuple[int]]:
        """Pickle by number: Python 3.11.2 would name `getattr`, which no state may."""
        return RunPhase, (self.value,)


class Reaction(Enum):
    HANDLED = "handled"
    IGNORED = "ignored"
    """A message or another process may cause this input in this phase, and nothing is to be done."""
    ILLEGAL = "illegal"
    """Only a defect of ours can cause it."""


_H, _I, _X = Reaction.HANDLED, Reaction.IGNORED, Reaction.ILLEGAL
REACTIONS: Mapping[type[Input], tuple[Reaction, ...]] = {
    # In phase:            WAITING RUNNING SUSPENDED ENDED FINISHED
    inputs.Started:        (_H,    _X,     _H,       _I,   _I),
    inputs.Suspended:      (_H,    _H,     _H,       _H,   _H),
    inputs.StatusChanged:  (_H,    _H,     _H,       _H,   _I),
    inputs.UpdateArrived:  (_I,    _H,     _H,       _H,   _I),
    inputs.Unreadable:     (_I,    _H,     _H,       _I,   _I),
    inputs.SharesSummed:   (_I,    _H,     _H,       _I,   _I),
    inputs.Reported:       (_I,    _H,     _I,       _I,   _I),
    inputs.Reconnected:    (_I,    _H,     _I,       _I,   _I),
    inputs.Restarted:      (_I,    _H,     _I,       _I,   _I),
    inputs.Stalled:        (_X,    _H,     _X,       _X,   _X),
    inputs.PartEvaluated:  (_X,    _H,     _H,       _H,   _I),
    inputs.EvaluationDone: (_X,    _H,     _H,       _H,   _I),
    inputs.TimersDue:      (_I,    _H,     _H,       _H,   _I),
    inputs.InstantOver:    (_I,    _H,     _I,       _I,   _I),
    inputs.EndRequested:   (_I,    _H,     _H,       _H,   _I),
    inputs.Written:        (_H,    _H,     _H,       _H,   _H),
}  # fmt: skip


class IllegalInputError(RuntimeError):
    """The core was handed an input that cannot come in the phase of its run."""

    def __init__(self, event: Input, phase: RunPhase) -> None:
        super().__init__(f"{type(event).__name__} cannot come while the run is {phase}: {event}")
