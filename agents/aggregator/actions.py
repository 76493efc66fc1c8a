"""What the aggregator's core wants done; `main.py` and other shells do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agents import events
from agents.rules.interface import Request


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the global model, as it is now, to `client`."""

    client: str
    version: int
    number: int
    lr: float | None = None
    """Step size that the rule assigns."""
    acknowledged: int = 0
    """Sequence number of the client's last update that the rule was given."""
    waiting: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    """As in `agents.wire.payloads.ModelMessage`."""

    @property
    def to_client(self) -> dict[str, Any]:
        """Fields sent along with the model."""
        return {
            "lr": self.lr,
            "acknowledged": self.acknowledged,
            "waiting": self.waiting,
            "lost": self.lost,
        }


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send the global model, as it is now, to all clients, as dispatch `number` of each."""

    version: int
    number: int
    to_client: ClassVar[dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class EndInstant:
    """Hand in `inputs.InstantOver` once everything that happened at this instant has been handed in: a
    broadcast, models or requests wait for it."""


@dataclass(frozen=True, slots=True)
class AskForReport:
    """Have `client` say which dispatch its next update will answer. It is sent after the dispatches
    before it, and answered after the updates before it, so the answer tells what was lost."""

    client: str
    about: int
    """The newest dispatch that the client has not answered, 0 for none. It says so in its answer: of two
    that are under way, each is known by it."""


@dataclass(frozen=True, slots=True)
class AskForUnacknowledged:
    """Have `client` send once more what was not acknowledged."""

    client: str


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Have `client` forget its update that answered `dispatch`: it was applied, is in the rule's buffer,
    or was reported as rejected."""

    client: str
    dispatch: int


@dataclass(frozen=True, slots=True)
class AskForShares:
    """Have `client` sum up its shares of the masks of a buffer."""

    client: str
    number: int
    """Of the buffer."""
    updates: Sequence[tuple[str, int, int]]
    """Client, dispatch and weight of each update in it."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the global model, as it is now, and hand in `inputs.EvaluationDone`."""

    version: int


@dataclass(frozen=True, slots=True)
class Save:
    """Keep the global model, as it is now; `final` at the end of the run."""

    version: int
    final: bool = False

    @property
    def name(self) -> str:
        """What it is kept as."""
        return "final" if self.final else f"{self.version:06d}"


@dataclass(frozen=True, slots=True)
class Log:
    record: events.Record


@dataclass(frozen=True, slots=True)
class StopClients:
    """Tell every client that the run is over."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over and its books are closed."""

    reason: str


Action = (
    Dispatch
    | Broadcast
    | Request
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
