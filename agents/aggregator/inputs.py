"""Inputs of the aggregator's core. Recordings contain the names and fields of these classes.

`at` is the device time in nanoseconds since the start of the run clock, as measured by the shell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from agents import events
from agents.pipeline.secure.field import Words
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.payloads import UpdateMessage


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
    segment: str


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


@dataclass(frozen=True, slots=True, eq=False)
class SharesSum:
    """A client's answer to `actions.AskForShares`."""

    number: int
    words: Words | None
    """None if the client lacks some of the shares."""


@dataclass(frozen=True, slots=True)
class SharesSummed:
    at: Nanoseconds
    client: str
    message: SharesSum


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
    """Answer to `actions.AskForReport`."""

    at: Nanoseconds
    client: str
    dispatch: int
    """Dispatch that the client's next update will answer; 0 if it waits for a model."""
    about: int
    """`about` of the `AskForReport` that this answers."""


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
    | SharesSummed
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
