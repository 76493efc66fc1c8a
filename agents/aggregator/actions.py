"""Actions that the aggregator's core requests, and shells such as `main.py` carry out. A message to a
client that needs nothing else is an action as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agents import events
from agents.rules.interface import RequestUpdate, Vectors
from agents.wire.messages import Acknowledgement, ReportRequest, UnmaskRequest


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the present global model. `lr` and the fields after it are those of
    `payloads.ModelMessage`."""

    client: str
    version: int
    number: int
    lr: float | None = None
    """Step size that the rule assigns; None for that in the client's settings."""
    acknowledged: int = 0
    """Sequence number of the client's last update that was passed to the rule; 0 if there was none."""
    waiting: tuple[int, ...] = ()
    """Numbers of the dispatches whose updates wait to be summed."""
    lost: tuple[int, ...] = ()
    """Numbers of the dispatches whose updates were lost with their sum."""
    vectors: Vectors = field(default_factory=dict)
    """The rule's own vectors. Nothing changes these arrays any more."""

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
    """The dispatch has the same `number` for every client."""

    version: int
    number: int
    to_client: ClassVar[dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class EndInstant:
    """Pass `inputs.InstantOver` to the core after all inputs of this instant. Until then it holds back a
    broadcast, models or requests."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Answered by `inputs.EvaluationDone`."""

    version: int


@dataclass(frozen=True, slots=True)
class Save:
    """`final`: whether the model is the last one of the run."""

    version: int
    final: bool = False

    @property
    def name(self) -> str:
        """Name of the file, without suffix."""
        return "final" if self.final else f"{self.version:06d}"


@dataclass(frozen=True, slots=True)
class Log:
    record: events.Record


@dataclass(frozen=True, slots=True)
class StopClients:
    """The run is over."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End the aggregator process: the run is over, and all records are written."""

    reason: str


Action = (
    Dispatch
    | BroadcastModel
    | RequestUpdate
    | EndInstant
    | ReportRequest
    | UnmaskRequest
    | Acknowledgement
    | Evaluate
    | Save
    | Log
    | StopClients
    | Finish
)
Actions = Sequence[Action]
