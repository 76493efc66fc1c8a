"""Settings and inputs of the aggregator's core, and which input it accepts in which phase of the run.

Recordings contain the names and fields of the inputs' classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from typing import Any, ClassVar, get_args

from agents import events
from agents.config import RunSettings
from agents.rules.interface import ClientSide
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.payloads import UpdateMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEvaluation:
    """How long a finished run waits for its last evaluation."""

    timeout: float | None = 30.0
    """Host seconds; None without a limit."""
    dilation: float = 1.0
    """Host seconds per second of device time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RunSettings):
    schema: str
    """Hash that the model's schema and each update must have."""
    side: ClientSide
    checkpoint_every: Nanoseconds | None = None
    """Device time; None if only the first and the last model are saved."""
    last_evaluation: LastEvaluation | None = None
    """None if evaluations take no time."""

    @classmethod
    def complete(cls, planned: RunSettings, **others: Any) -> Settings:
        """`others`: the fields that `planned` lacks."""
        return cls(**{one.name: getattr(planned, one.name) for one in fields(planned)}, **others)


# Inputs of the aggregator's core. Recordings contain the names and fields of these classes.
#
# `at` is the device time in nanoseconds since the start of the run clock, as measured by the shell.


@dataclass(frozen=True, slots=True)
class Started:
    """The run clock starts or resumes at `at`, with the clients that are ready now."""

    at: Nanoseconds
    wall_clock: float
    """Unix time in seconds."""
    epoch: Nanoseconds
    """Time of the clients' clocks at device time 0."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """All processes have ended, regularly or by a crash, and start again. The run clock stands still at
    `at` until `Started`."""

    at: Nanoseconds
    leg: str


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """By the client (`joining`, `ready` or `offline`), or its last will."""

    at: Nanoseconds
    client: str
    state: str


@dataclass(frozen=True, slots=True)
class UpdateArrived:
    """Arrived on the topic of `sender`, handled at `at`."""

    at: Nanoseconds
    sender: str
    size: int
    """Bytes."""
    arrived: Nanoseconds
    """Device time at which the whole message had arrived."""
    message: UpdateMessage


@dataclass(frozen=True, slots=True)
class Answered:
    """A client's answer to `messages.UnmaskRequest`, as it was sent."""

    at: Nanoseconds
    client: str
    message: bytes | bytearray


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection to the broker, lost at `since`, is restored. Messages may have been lost."""

    at: Nanoseconds
    since: Nanoseconds


@dataclass(frozen=True, slots=True)
class Restarted:
    """Only the aggregator was restarted: it was absent from `since` to `at`, and its last messages may
    be lost. So each client is asked for a report when its retained status `ready` arrives."""

    at: Nanoseconds
    since: Nanoseconds


@dataclass(frozen=True, slots=True)
class Reported:
    """Answer to `messages.ReportRequest`."""

    at: Nanoseconds
    client: str
    dispatch: int
    """Dispatch that the client's next update will answer; 0 if it waits for a model."""
    about: int
    """`about` of the `ReportRequest` that this answers."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """No update since `since`, although one was expected (`AggregatorCore.silent_since`)."""

    at: Nanoseconds
    since: Nanoseconds


@dataclass(frozen=True, slots=True)
class Unreadable:
    at: Nanoseconds
    sender: str
    reason: str


@dataclass(frozen=True, slots=True)
class PartEvaluated:
    """Fields as in `events.EvaluatedPart`. All parts come before the `EvaluationDone` of the same
    version."""

    at: Nanoseconds
    version: int
    part: str
    name: str
    samples: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    at: Nanoseconds
    version: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class TimersDue:
    """Fire all timers that are due."""

    at: Nanoseconds


@dataclass(frozen=True, slots=True)
class InstantOver:
    """The core has received all inputs of this instant: send what waits for its end."""

    at: Nanoseconds


@dataclass(frozen=True, slots=True)
class EndRequested:
    at: Nanoseconds
    reason: str


@dataclass(frozen=True, slots=True)
class Written:
    """A record that the shell has made, such as that of an action on a device."""

    line: str
    """A line of `events.jsonl`."""
    at: ClassVar[Nanoseconds] = 0
    """Not used: the record has its own time."""

    @classmethod
    def from_record(cls, record: events.Record) -> Written:
        return cls(events.to_line(record))


Input = (
    Started
    | Suspended
    | StatusChanged
    | UpdateArrived
    | Answered
    | Reconnected
    | Restarted
    | Reported
    | Stalled
    | Unreadable
    | PartEvaluated
    | EvaluationDone
    | TimersDue
    | InstantOver
    | EndRequested
    | Written
)
INPUTS: dict[str, type[Input]] = {kind.__name__: kind for kind in get_args(Input)}


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
    Started:        (_H,    _X,     _H,       _I,   _I),
    Suspended:      (_H,    _H,     _H,       _H,   _H),
    StatusChanged:  (_H,    _H,     _H,       _H,   _I),
    UpdateArrived:  (_I,    _H,     _H,       _H,   _I),
    Unreadable:     (_I,    _H,     _H,       _I,   _I),
    Answered:       (_I,    _H,     _H,       _I,   _I),
    Reported:       (_I,    _H,     _I,       _I,   _I),
    Reconnected:    (_I,    _H,     _I,       _I,   _I),
    Restarted:      (_I,    _H,     _I,       _I,   _I),
    Stalled:        (_X,    _H,     _X,       _X,   _X),
    PartEvaluated:  (_X,    _H,     _H,       _H,   _I),
    EvaluationDone: (_X,    _H,     _H,       _H,   _I),
    TimersDue:      (_I,    _H,     _H,       _H,   _I),
    InstantOver:    (_I,    _H,     _I,       _I,   _I),
    EndRequested:   (_I,    _H,     _H,       _H,   _I),
    Written:        (_H,    _H,     _H,       _H,   _H),
}  # fmt: skip


class IllegalInputError(RuntimeError):
    """An input that is impossible in the phase of the run."""

    def __init__(self, event: Input, phase: RunPhase) -> None:
        super().__init__(f"{type(event).__name__} is impossible while the run is {phase}: {event}")
