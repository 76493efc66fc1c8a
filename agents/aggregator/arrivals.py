"""Updates that were passed to the rule and are not applied yet, with their records. No I/O and no clock.

The updates' vectors are not kept, so a rule with a running sum needs memory for only one model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agents import events
from agents.aggregator.actions import Log
from agents.aggregator.dispatches import Dispatched
from agents.aggregator.inputs import UpdateArrived
from agents.models import buffers
from agents.models.buffers import Buffers
from agents.rules.interface import Contribution
from agents.timing.nanoseconds import Nanoseconds, to_seconds
from agents.wire.payloads import plain_size


@dataclass(frozen=True, slots=True)
class _Arrival:
    record: partial[events.UpdateApplied]
    """Record of the update, without the fields that are known only when the update is applied."""
    buffers: Buffers


class Arrivals:
    """Updates that wait to be applied, by client and dispatch, in the order of their arrival."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], _Arrival] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._waiting)

    def add(
        self,
        event: UpdateArrived,
        dispatch: Dispatched,
        epoch: Nanoseconds,
        parameters: int,
        facts: Mapping[str, Any],
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        """`epoch`: time of the client's clock at device time 0; `parameters`: of the model; `facts`:
        further fields of the record; `sizes`: elements of each of the rule's own vectors."""
        message, before = event.message, event.size
        if message.encoded is not None:
            before = plain_size(message, parameters, sizes)
        record = partial(
            events.UpdateApplied,
            client=event.sender,
            sequence=message.sequence,
            kind=message.kind,
            base_version=message.base_version,
            samples=message.samples,
            steps=message.steps,
            loss=message.loss,
            bytes=event.size,
            bytes_before=float(before),
            dispatched=to_seconds(dispatch.at),
            downloaded=to_seconds(message.downloaded - epoch),
            train_start=to_seconds(message.train_start - epoch),
            train_end=to_seconds(message.train_end - epoch),
            sent=to_seconds(message.sent - epoch),
            arrived=to_seconds(event.arrived),
            dispatch=message.dispatch,
            **facts,
        )
        self._waiting[event.sender, message.dispatch] = _Arrival(record, message.buffers)

    def dispatches_of(self, client: str) -> tuple[int, ...]:
        return tuple(dispatch for sender, dispatch in self._waiting if sender == client)

    def averaged_buffers(
        self, old: Buffers, contributions: Sequence[Contribution], *, shares: bool
    ) -> Buffers:
        """Weighted mean of the updates' buffers. `contributions` must not be empty. If `shares`, the
        weights are shares in a mean of models, and the `old` buffers have the remaining share."""
        weights = {(used.client, used.dispatch): used.weight for used in contributions}
        arrived = [key for key in self._waiting if key in weights]
        used = [(weights[key], self._waiting[key].buffers) for key in arrived]
        return buffers.averaged(old, used, shares=shares)

    def apply(self, used: Contribution, version: int, at: Nanoseconds) -> Log:
        """Remove an applied update; return its record."""
        record = self._waiting.pop((used.client, used.dispatch)).record(
            applied_version=version,
            staleness=version - 1 - used.base_version,
            weight=used.weight,
            applied=to_seconds(at),
        )
        return Log(record)

    def drop(self, client: str, dispatch: int, at: Nanoseconds) -> Log:
        """Remove an update that will not be applied; return its record."""
        return _unapplied(self._waiting.pop((client, dispatch)), at)

    def unapplied_records(self, at: Nanoseconds) -> list[Log]:
        """Updates that still wait when the run ends at `at`."""
        return [_unapplied(arrival, at) for arrival in self._waiting.values()]


def _unapplied(arrival: _Arrival, at: Nanoseconds) -> Log:
    known = arrival.record.keywords
    return Log(
        events.RoundUnfinished(
            at=to_seconds(at),
            client=known["client"],
            base_version=known["base_version"],
            dispatched=known["dispatched"],
            until=known["arrived"],
            dispatch=known["dispatch"],
        )
    )
