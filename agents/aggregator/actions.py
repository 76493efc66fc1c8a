"""What the aggregator's core wants done; `main.py` and other shells do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents import events


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the global model, as it is now, to `client`."""

    client: str
    version: int
    number: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the global model, as it is now, and call `evaluated`."""

    version: int


@dataclass(frozen=True, slots=True)
class Save:
    """Keep the global model, as it is now; `final` at the end of the run."""

    version: int
    final: bool = False


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


Action = Dispatch | Evaluate | Save | Log | StopClients | Finish
Actions = Sequence[Action]
