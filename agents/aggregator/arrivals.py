"""Updates that the rule was given, kept for their records until they are applied."""

from __future__ import annotations

from dataclasses import dataclass

from agents import events
from agents.rules.interface import Contribution
from agents.wire import UpdateMessage


@dataclass(frozen=True, slots=True)
class Arrival:
    """An update, and when the model it answers was dispatched and it arrived, in device time."""

    message: UpdateMessage
    size: int
    dispatched: float
    at: float


class Arrivals:
    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Arrival] = {}

    def keep(self, arrival: Arrival) -> None:
        self._kept[arrival.message.client, arrival.message.dispatch] = arrival

    def drop(self, client: str, dispatch: int) -> None:
        """It changed nothing."""
        del self._kept[client, dispatch]

    def applied(self, used: Contribution, version: int, at: float, epoch: float) -> events.UpdateApplied:
        """The record of an update that became part of `version` at time `at`.

        `epoch` is what the client's clock showed at time 0.
        """
        arrival = self._kept.pop((used.client, used.dispatch))
        message = arrival.message
        return events.UpdateApplied(
            client=used.client,
            sequence=message.sequence,
            kind=message.kind,
            base_version=used.base_version,
            applied_version=version,
            staleness=version - 1 - used.base_version,
            weight=used.weight,
            samples=message.samples,
            steps=message.steps,
            loss=message.loss,
            bytes=arrival.size,
            dispatched=arrival.dispatched,
            downloaded=message.downloaded - epoch,
            train_start=message.train_start - epoch,
            train_end=message.train_end - epoch,
            sent=message.sent - epoch,
            arrived=arrival.at,
            applied=at,
        )
