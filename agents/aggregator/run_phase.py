"""Phases of a run, and the inputs that the aggregator's core accepts in each phase."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum

from agents.aggregator import inputs
from agents.aggregator.inputs import Input


class RunPhase(IntEnum):
    """The value of a phase is its column in `REACTIONS`."""

    WAITING = 0
    """The run clock has not started; clients report that they are ready."""
    RUNNING = 1
    SUSPENDED = 2
    """All processes were started again, and the run clock stands still until `Started`. Updates that
    clients have kept are accepted."""
    ENDED = 3
    """No models are sent and no versions are made. The last evaluation is not done yet."""
    FINISHED = 4
    """All records are written. A run that ended early can be resumed by `Suspended`."""

    def __str__(self) -> str:
        return self.name.lower()

    def __reduce_ex__(self, protocol: object) -> tuple[type[RunPhase], tuple[int]]:
        """Pickle the phase by its number. By default, Python 3.11.2 would add a reference to `getattr`,
        which checkpoints must not contain."""
        return RunPhase, (self.value,)


class Reaction(Enum):
    HANDLED = "handled"
    IGNORED = "ignored"
    """Messages or other processes can cause this input; it has no effect."""
    ILLEGAL = "illegal"
    """Only a defect of the program can cause this input."""


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
    """An input that is impossible in the phase of the run."""

    def __init__(self, event: Input, phase: RunPhase) -> None:
        super().__init__(f"{type(event).__name__} is impossible while the run is {phase}: {event}")
