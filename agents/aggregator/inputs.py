"""What can happen to an aggregator: the one kind of thing that its core is handed.

`at` is device time in nanoseconds since the run clock started, as the shell saw it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from agents.nanoseconds import Nanoseconds
from agents.wire import UpdateMessage


@dataclass(frozen=True, slots=True)
class Started:
    """The run clock starts, or goes on at `at`, with the clients that are ready now."""

    at: Nanoseconds
    wall_clock: float
    """Unix time in seconds."""
    epoch: Nanoseconds
    """What the clients' own clocks showed at time 0."""
    updates: int = 0
    """Updates applied by an earlier part of the run."""


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


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What `sender` sent is no update, because of `reason`."""

    at: Nanoseconds
    sender: str
    reason: str


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


Input = (
    Started
    | StatusChanged
    | UpdateArrived
    | Unreadable
    | EvaluationDone
    | TimersDue
    | InstantOver
    | EndRequested
)
INPUTS: dict[str, type[Input]] = {kind.__name__: kind for kind in get_args(Input)}
