"""Records of updates that the rule has received, to be completed once the updates are applied.

The vectors are not kept: a rule that keeps a running sum is to need one model's memory, however many
updates go into it.
"""

from __future__ import annotations

from functools import partial

from agents import events
from agents.nanoseconds import Nanoseconds, to_seconds
from agents.rules.interface import Contribution
from agents.wire import UpdateMessage


class Arrivals:
    def __init__(self) -> None:
        self._records: dict[tuple[str, int], partial[events.UpdateApplied]] = {}
        """Records that lack only the fields known at application."""

    def __len__(self) -> int:
        return len(self._records)

    def keep(
        self,
        message: UpdateMessage,
        size: int,
        dispatched: Nanoseconds,
        arrived: Nanoseconds,
        epoch: Nanoseconds,
    ) -> None:
        """The model that `message`, of `size` bytes, answers was dispatched, and it arrived, at these
        device times; `epoch` is what the client's clock showed at time 0."""
        self._records[message.client, message.dispatch] = partial(
            events.UpdateApplied,
            client=message.client,
            sequence=message.sequence,
            kind=message.kind,
            base_version=message.base_version,
            samples=message.samples,
            steps=message.steps,
            loss=message.loss,
            bytes=size,
            dispatched=to_seconds(dispatched),
            downloaded=to_seconds(message.downloaded - epoch),
            train_start=to_seconds(message.train_start - epoch),
            train_end=to_seconds(message.train_end - epoch),
            sent=to_seconds(message.sent - epoch),
            arrived=to_seconds(arrived),
        )

    def drop(self, client: str, dispatch: int) -> None:
        """It changed nothing."""
        del self._records[client, dispatch]

    def applied(self, used: Contribution, version: int, at: Nanoseconds) -> events.UpdateApplied:
        """The record of an update that became part of `version` at time `at`."""
        return self._records.pop((used.client, used.dispatch))(
            applied_version=version,
            staleness=version - 1 - used.base_version,
            weight=used.weight,
            applied=to_seconds(at),
        )
