"""Actions that the aggregator's core requests; `main.py` and other shells carry them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agents import events
from agents.rules.interface import RequestUpdate, Vectors


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the present global model to `client`. `lr` and the fields after it have the same meaning as
    in `payloads.ModelMessage`."""

    client: str
    version: int
    """Version of the model."""
    number: int
    """Number of the dispatch."""
    lr: float | None = None
    """Step size that the rule assigns; None if the client uses the step size in its settings."""
    acknowledged: int = 0
    """Sequence number of the client's last update that was passed to the rule; 0 if no update was
    passed."""
    waiting: tuple[int, ...] = ()
    """Numbers of the dispatches whose updates wait to be summed (secure aggregation)."""
    lost: tuple[int, ...] = ()
    """Numbers of the dispatches whose updates were lost with their sum (secure aggregation)."""
    vectors: Vectors = field(default_factory=dict)
    """The rule's own vectors by name. Nothing changes these arrays any more."""

    @property
    def to_client(self) -> dict[str, Any]:
        """Fields sent along with the model."""
        return {
            "lr": self.lr,
            "acknowledged": self.acknowledged,
            "waiting": self.waiting,
            "lost": self.lost,
            "vectors": self.vectors,
        }


@dataclass(frozen=True, slots=True)
class BroadcastModel:
    """Send the present global model to all clients. The dispatch has the same `number` for every
    client."""

    version: int
    number: int
    to_client: ClassVar[dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class EndInstant:
    """Pass `inputs.InstantOver` to the core when the core has received all inputs of this instant. Until
    then the core holds back a broadcast, models or requests."""


@dataclass(frozen=True, slots=True)
class AskForReport:
    """Ask `client` which dispatch its next update will answer. The request arrives after all earlier
    dispatches, and the answer after all earlier updates, so the answer shows which messages were
    lost."""

    client: str
    about: int
    """Number of the newest dispatch that the client has not answered; 0 if every dispatch was answered.
    The client repeats this number in its report, to show which request the report answers."""


@dataclass(frozen=True, slots=True)
class AskForUnacknowledged:
    """Ask `client` to send its unacknowledged updates again."""

    client: str


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Let `client` delete the update that answered `dispatch`. That update was applied, is in the rule's
    buffer, or was recorded as rejected."""

    client: str
    dispatch: int


@dataclass(frozen=True, slots=True)
class AskForShares:
    """Ask `client` for the weighted sum of the mask shares that it holds for `updates` (secure
    aggregation)."""

    client: str
    number: int
    """Number of the sum."""
    updates: Sequence[tuple[str, int, int]]
    """Client, dispatch and weight of each update in the sum."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the present global model, and pass `inputs.EvaluationDone` to the core."""

    version: int


@dataclass(frozen=True, slots=True)
class Save:
    """Save the present global model to a file. `final`: whether the model is the last one of the run."""

    version: int
    final: bool = False

    @property
    def name(self) -> str:
        """Name of the file, without suffix."""
        return "final" if self.final else f"{self.version:06d}"


@dataclass(frozen=True, slots=True)
class Log:
    """Write `record` to `events.jsonl`."""

    record: events.Record


@dataclass(frozen=True, slots=True)
class StopClients:
    """Ask every client to end, because the run is over."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End the aggregator process: the run is over, and all records are written."""

    reason: str


Action = (
    Dispatch
    | BroadcastModel
    | RequestUpdate
    | EndInstant
    | AskForReport
    | AskForUnacknowledged
    | AskForShares
    | Acknowledge
    | Evaluate
    | Save
    | Log
    | StopClients
    | Finish
)
Actions = Sequence[Action]
