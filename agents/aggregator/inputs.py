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
    """All processes of the run have ended, regularly or by a crash, and start again. The run clock
    stands still at `at` until `Started`."""

    at: Nanoseconds
    segment: str
    """Id of the new segment of the run."""


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """A client reported its state (`joining`, `ready` or `offline`), or the broker published the
    client's last will."""

    at: Nanoseconds
    client: str
    state: str


@dataclass(frozen=True, slots=True)
class UpdateArrived:
    """`message` arrived on the topic of `sender`, and is handled at `at`."""

    at: Nanoseconds
    sender: str
    size: int
    """Length of the payload in bytes."""
    arrived: Nanoseconds
    """Device time in ns at which the whole message had arrived."""
    message: UpdateMessage


@dataclass(frozen=True, slots=True, eq=False)
class SharesSum:
    """A client's answer to `actions.AskForShares`."""

    number: int
    """Number of the sum."""
    words: Words | None
    """Sum of shares; None if the client lacks some of the shares."""


@dataclass(frozen=True, slots=True)
class SharesSummed:
    """`client` has answered `actions.AskForShares`."""

    at: Nanoseconds
    client: str
    message: SharesSum


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection to the broker was lost at `since` and is restored now. Messages may have been
    lost."""

    at: Nanoseconds
    since: Nanoseconds


@dataclass(frozen=True, slots=True)
class Restarted:
    """Only the aggregator was restarted, while the run continued. The aggregator was absent from `since`
    to `at`, and its last messages may be lost. So each client is asked for a report when the client's
    retained status `ready` arrives."""

    at: Nanoseconds
    since: Nanoseconds


@dataclass(frozen=True, slots=True)
class Reported:
    """`client` reports which dispatch its next update will answer (`actions.AskForReport`)."""

    at: Nanoseconds
    client: str
    dispatch: int
    """Number of the dispatch that the client's next update will answer; 0 if the client waits for a
    model."""
    about: int
    """Value of `about` in the `AskForReport` that the report answers."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """No update has arrived since `since`, although one was expected
    (`AggregatorCore.silent_since`)."""

    at: Nanoseconds
    since: Nanoseconds


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message of `sender` is not a valid update, because of `reason`."""

    at: Nanoseconds
    sender: str
    reason: str


@dataclass(frozen=True, slots=True)
class PartEvaluated:
    """Result of an evaluation on one part of the data, with fields as in `events.EvaluatedPart`. The
    results on all parts come before the `EvaluationDone` of the same version."""

    at: Nanoseconds
    version: int
    part: str
    name: str
    samples: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """Result of the evaluation that `actions.Evaluate` requested."""

    at: Nanoseconds
    version: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class TimersDue:
    """Timers are due at `at`: fire all of them."""

    at: Nanoseconds


@dataclass(frozen=True, slots=True)
class InstantOver:
    """The core has received all inputs of the instant `at`: send the messages that wait for the end
    of the instant."""

    at: Nanoseconds


@dataclass(frozen=True, slots=True)
class EndRequested:
    """End the run, because of `reason`."""

    at: Nanoseconds
    reason: str


@dataclass(frozen=True, slots=True)
class Written:
    """A record that the shell has made, such as the record of an action on a device."""

    line: str
    """The record as a line of `events.jsonl`."""
    at: ClassVar[Nanoseconds] = 0
    """Not used, because the record has its own time."""

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
