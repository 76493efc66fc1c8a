"""What can happen to an aggregator: the one kind of thing that its core is handed.

`at` is device time in nanoseconds since the run clock started, as the shell saw it.
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
    """The run clock starts, or goes on at `at`, with the clients that are ready now."""

    at: Nanoseconds
    wall_clock: float
    """Unix time in seconds."""
    epoch: Nanoseconds
    """What the clients' own clocks showed at time 0."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """All processes of the run have ended, in order or by a crash, and are started anew: the run clock
    stands still at `at` until `Started`."""

    at: Nanoseconds
    segment: str
    """Id of the segment of the run that begins."""


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """A client, or its last will, reports its state: `joining`, `ready` or `offline`."""

    at: Nanoseconds
    client: str
    state: str


@dataclass(frozen=True, slots=True)
class UpdateArrived:
    """`message` came in on the topic of `sender`, and is handled at `at`."""

    at: Nanoseconds
    sender: str
    size: int
    """Bytes of the payload."""
    arrived: Nanoseconds
    """When all of it was there."""
    message: UpdateMessage


@dataclass(frozen=True, slots=True, eq=False)
class SharesSum:
    """A client's answer to `actions.AskForShares`."""

    number: int
    words: Words | None
    """None: it lacks some of the shares."""


@dataclass(frozen=True, slots=True)
class SharesSummed:
    """`client` has summed up its shares of the masks of a buffer."""

    at: Nanoseconds
    client: str
    message: SharesSum


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection to the broker, lost at `since`, is there again: messages may be lost."""

    at: Nanoseconds
    since: Nanoseconds


@dataclass(frozen=True, slots=True)
class Restarted:
    """The aggregator alone was started again within the run, and was away since `since`. What it sent
    last may be lost: each client is asked for that when its retained status says that it is ready."""

    at: Nanoseconds
    since: Nanoseconds


@dataclass(frozen=True, slots=True)
class Reported:
    """`client` says which dispatch its next update will answer, 0 for none (`actions.AskForReport`)."""

    at: Nanoseconds
    client: str
    dispatch: int
    about: int
    """As it was asked."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """Nothing has arrived since `since`, though something should have: `AggregatorCore.silent_since`."""

    at: Nanoseconds
    since: Nanoseconds


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What `sender` sent is no update, because of `reason`."""

    at: Nanoseconds
    sender: str
    reason: str


@dataclass(frozen=True, slots=True)
class PartEvaluated:
    """Result for one part of the data; the `EvaluationDone` of the same version follows."""

    at: Nanoseconds
    version: int
    part: str
    name: str
    samples: int
    loss: float
    accuracy: float
    """Like the others, as in `events.EvaluatedPart`."""


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """Result of the evaluation that `actions.Evaluate` requested."""

    at: Nanoseconds
    version: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class TimersDue:
    """Every timer that is due at `at` is to fire."""

    at: Nanoseconds


@dataclass(frozen=True, slots=True)
class InstantOver:
    """Everything that happened at `at` has been handed in: what waited for that is to be sent."""

    at: Nanoseconds


@dataclass(frozen=True, slots=True)
class EndRequested:
    """The run is to end, because of `reason`."""

    at: Nanoseconds
    reason: str


@dataclass(frozen=True, slots=True)
class Written:
    """The shell knows something that is to be recorded, such as what was done to a device."""

    line: str
    """The record as a line of `events.jsonl`."""
    at: ClassVar[Nanoseconds] = 0
    """The record has its own time, and this input none."""

    @classmethod
    def of(cls, record: events.Record) -> Written:
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
