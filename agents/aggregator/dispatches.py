"""Models sent to clients, and the updates that answer them, until these are applied or lost. No I/O and
no clock."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from agents import events
from agents.aggregator.actions import Log
from agents.aggregator.inputs import UpdateArrived
from agents.models import vectors
from agents.models.vectors import Buffers
from agents.rules.interface import Contribution
from agents.timing.nanoseconds import Nanoseconds, to_seconds
from agents.wire.payloads import plain_size

_REMEMBERED = 64
"""A client's latest answers that are remembered, to detect duplicates. It has fewer in flight."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    version: int
    at: Nanoseconds
    lr: float | None = None


class NoAnswer(Enum):
    DUPLICATE = "duplicate"
    """An earlier update has answered the dispatch."""
    NEVER_SENT = "never sent"
    """No dispatch has this number."""
    NOT_OPEN = "not open"
    """The client may not answer the dispatch any more, or updates are not accepted now."""


class Dispatches:
    """Dispatches are numbered from 1. After its answer to a dispatch, a client answers no earlier one. A
    broadcast is one dispatch, which every client may answer."""

    def __init__(self) -> None:
        self._count = 0
        self._open: dict[str, dict[int, Dispatched]] = {}
        self._broadcasts: dict[int, Dispatched] = {}
        self._broadcast_numbers: list[int] = []
        """Ascending."""
        self._answered: dict[str, int] = {}
        self._dealt_with: dict[str, deque[int]] = {}
        """Dispatches that each client's latest updates answered."""

    def send(self, client: str, version: int, at: Nanoseconds, lr: float | None = None) -> int:
        """Return its number."""
        self._count += 1
        self._open.setdefault(client, {})[self._count] = Dispatched(version, at, lr)
        return self._count

    def broadcast(self, version: int, at: Nanoseconds, present: Iterable[str]) -> int:
        """Return its number. Forget broadcasts that none of the clients `present` can still answer."""
        answered = min((self._answered.get(client, 0) for client in present), default=0)
        passed = bisect_right(self._broadcast_numbers, answered)
        for number in self._broadcast_numbers[:passed]:
            del self._broadcasts[number]
        del self._broadcast_numbers[:passed]
        self._count += 1
        self._broadcasts[self._count] = Dispatched(version, at)
        self._broadcast_numbers.append(self._count)
        return self._count

    def was_sent(self, number: int) -> bool:
        return 0 < number <= self._count

    def find(self, client: str, number: int) -> Dispatched | None:
        """None if `client` may not answer it."""
        if number in self._broadcasts and number > self._answered.get(client, 0):
            return self._broadcasts[number]
        return self._open.get(client, {}).get(number)

    def close(self, client: str, number: int) -> None:
        """Close the dispatch, and all earlier ones of this client."""
        later = {n: sent for n, sent in self._open.get(client, {}).items() if n > number}
        self._open[client] = later
        self._answered[client] = number

    def answer(
        self, client: str, number: int, *, is_valid: bool, is_taken: bool
    ) -> Dispatched | NoAnswer:
        """Handle an update that claims to answer dispatch `number`. Return the dispatch, or why it
        answers none.

        `is_valid`: a further update with the same claim is a duplicate. `is_taken`: updates of the
        client are accepted; the dispatch and all earlier ones are closed.
        """
        dealt_with = self._dealt_with.get(client)
        if dealt_with is not None and number in dealt_with:
            return NoAnswer.DUPLICATE
        if not 0 < number <= self._count:
            return NoAnswer.NEVER_SENT
        if not is_valid:
            return NoAnswer.NOT_OPEN
        if dealt_with is None:
            dealt_with = self._dealt_with[client] = deque(maxlen=_REMEMBERED)
        dealt_with.append(number)
        found = self.find(client, number) if is_taken else None
        if found is None:
            return NoAnswer.NOT_OPEN
        self.close(client, number)
        return found

    def first_open(self, client: str) -> Dispatched | None:
        """The oldest dispatch that `client` may still answer, broadcasts included."""
        if not self._broadcast_numbers and client not in self._open:
            return None
        answered = self._answered.get(client, 0)
        numbers = [*self._open.get(client, {})][:1]
        later = bisect_right(self._broadcast_numbers, answered)
        numbers += self._broadcast_numbers[later : later + 1]
        return self.find(client, min(numbers, default=0))

    def newest_open(self, client: str) -> int:
        """The newest dispatch that `client` may still answer, broadcasts included; 0 if there is
        none."""
        own, broadcast = next(reversed(self._open.get(client, {})), 0), self._broadcast_numbers[-1:]
        return max(number if self.find(client, number) else 0 for number in (own, *broadcast))

    def open_versions(self, clients: Collection[str]) -> set[int]:
        """Models that any of `clients` may still answer, broadcasts included."""
        own = (sent for client in clients for sent in self._open.get(client, {}).values())
        answered = min((self._answered.get(client, 0) for client in clients), default=self._count)
        later = self._broadcast_numbers[bisect_right(self._broadcast_numbers, answered) :]
        return {sent.version for sent in (*own, *(self._broadcasts[number] for number in later))}

    def has_open(self, client: str) -> bool:
        """Whether `client` may still answer a dispatch that is no broadcast."""
        return bool(self._open.get(client))

    def problems(self, present: Collection[str], *, is_over: bool) -> Iterator[str]:
        """`is_over`: the run is over, so answers are rejected, and dispatches stay open."""
        for client, sent in self._open.items():
            if sent and client not in present:
                yield f"{client} is not present, and is to answer {sent}"
            if [*sent] != sorted(sent) or not all(map(self.was_sent, sent)):
                yield f"{client} is to answer {sent}, of {self._count} dispatches"
            if not is_over and (dealt_with := sent.keys() & self._dealt_with.get(client, ())):
                yield f"{client} has answered {dealt_with}, which are still open"
        if self._broadcast_numbers != sorted(self._broadcasts):
            yield f"the broadcasts {self._broadcast_numbers} are not those of {self._broadcasts}"
        for client, answered in self._answered.items():
            if not 0 <= answered <= self._count:
                yield f"{client} has answered {answered}, of {self._count} dispatches"

    def forget(self, client: str) -> None:
        self._open.pop(client, None)

    def restart(self, client: str) -> None:
        """The client's process has restarted: it answers no earlier dispatch."""
        self._answered[client] = self._count


# Updates that were passed to the rule and are not applied yet, with their records.
#
# The updates' vectors are not kept, so a rule with a running sum needs memory for only one model.


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
        return vectors.averaged(old, used, shares=shares)

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


class Losses:
    """Lost updates of clients that remember which of theirs were applied. Every dispatch to a client
    lists them, until it has answered one that does."""

    def __init__(self) -> None:
        self._announced: dict[str, dict[int, int]] = {}
        """By client: dispatch that the lost update answered -> first dispatch that listed the loss; 0 if
        there was none."""

    def add(self, client: str, dispatch: int) -> None:
        self._announced.setdefault(client, {})[dispatch] = 0

    def announce(self, client: str, number: int) -> tuple[int, ...]:
        """Return the dispatches whose answers were lost, which dispatch `number` will list."""
        told = self._announced.get(client, {})
        for dispatch, first in told.items():
            told[dispatch] = first or number
        return tuple(told)

    def confirm(self, client: str, number: int) -> None:
        """The client has answered dispatch `number`: losses that it listed are known."""
        if client in self._announced:
            told = self._announced[client].items()
            self._announced[client] = {one: first for one, first in told if not 0 < first <= number}

    def forget(self, client: str) -> None:
        self._announced.pop(client, None)
