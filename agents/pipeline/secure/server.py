"""Server half of secure aggregation: masked updates, and the sums that the rule requests. No I/O and no
clock.

A masked update waits until the rule puts it into a sum. A sum waits for the clients' answers. An answer
is a sum of shares of the masks. The sum of updates is opened (`SumOpened`) when enough clients have
answered. The sum of updates is lost (`SumLost`) when too few clients are left that can answer, or when
the opened vector cannot be a sum of valid updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agents import events
from agents.aggregator.actions import Log
from agents.models.vectors import Vector
from agents.pipeline.interface import BASE_LACKS, ServerStep
from agents.pipeline.secure.field import Words
from agents.pipeline.secure.masked_update import Masked
from agents.pipeline.secure.secure_messages import sum_size
from agents.pipeline.secure.sums import MaskedSums, Sum, Summand
from agents.rules.interface import SumUp
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from agents.wire.payloads import Encoded, UpdateMessage

_NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class SumBegun:
    """Sum `number` has begun and waits for the answers of the clients `holders`."""

    number: int
    holders: Set[str]
    """Clients that are asked for shares."""
    updates: list[tuple[str, int, int]]
    """Client, dispatch and weight of each update in the sum."""


@dataclass(frozen=True, slots=True, eq=False)
class SumOpened:
    """Sum `number` has been opened."""

    number: int
    wanted: SumUp
    """The rule's request, but with the weights that were used in `total`: secure aggregation rounds
    weights."""
    total: Vector
    """Weighted sum of the updates: float64, shape (d,)."""


@dataclass(frozen=True, slots=True, eq=False)
class SumLost:
    """Sum `number` cannot be used; the updates in it are lost too."""

    number: int
    wanted: SumUp
    """The rule's request."""
    reason: str
    """Reason, as the end of a sentence about the sum, such as `is lost: ...`."""
    answered: tuple[str, ...] = ()
    """Clients whose answers opened a wrong sum; empty if the sum was not opened."""

    def records(self, at: float) -> list[Log]:
        """Return the records about the lost sum. `at`: time of the records in seconds."""
        what = f"a buffer of {len(self.wanted.contributions)} updates {self.reason}"
        if not self.answered:
            return [Log(events.Note(at, what))]
        senders = tuple(sorted({used.client for used in self.wanted.contributions}))
        wrong = events.WrongSum(at, senders, self.answered)
        return [Log(wrong), Log(events.Note(at, f"{what}; {wrong.senders}"))]


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingUpdate:
    """A masked update that is not in a sum yet."""

    masked: Masked
    lost_by: set[str] = field(default_factory=set)
    """Clients that have left since the update arrived. Their shares of the update's mask are lost."""


class SecureSums(ServerStep):
    """Server half of secure aggregation, for one run."""

    def __init__(self, sums: MaskedSums) -> None:
        self.sums = sums
        self.answer_size = sum_size(sums.code.length)
        """Maximum size of a client's answer, in bytes."""
        self._received: dict[tuple[str, int], _WaitingUpdate] = {}
        """Updates that are not in a sum yet, by client and dispatch."""
        self._wanted: dict[int, SumUp] = {}
        """Sums that wait for the clients' answers: number of the sum -> the rule's request."""

    @property
    def waiting(self) -> Set[int]:
        """Numbers of the sums that wait for answers."""
        return self._wanted.keys()

    @property
    def timeout(self) -> Nanoseconds:
        """Nanoseconds within which a sum must be opened after its shares were requested. After this
        time, the sum is lost."""
        return from_seconds(self.sums.settings.timeout)

    def receive(
        self, client: str, message: UpdateMessage, encoded: Encoded, base: Vector | None
    ) -> Vector | str:
        """Keep a masked update until it is put into a sum. Return `base` for an update of kind `model`,
        an empty vector for any other update, or the reason to reject the update."""
        try:
            masked = Masked.from_encoded(encoded)
        except ValueError as error:
            return f"masked: {error}"
        if (problem := self.sums.problem_with(masked)) is not None:
            return problem
        if not 0 <= masked.took <= message.sent - message.downloaded:
            return "masking time out of range, expected from 0 to the duration of the round"
        if message.kind == "model" and base is None:
            return f"masked, but {BASE_LACKS}"
        self._received[client, message.dispatch] = _WaitingUpdate(masked)
        return base if message.kind == "model" and base is not None else _NOTHING

    def record_fields(self, client: str, dispatch: int) -> dict[str, Any]:
        """Return the fields about the mask in the update's record (`agents.events.UpdateApplied`)."""
        masked = self._received[client, dispatch].masked
        return {"masking": to_seconds(masked.took), "outside": masked.outside}

    def drop(self, client: str, dispatch: int) -> None:
        """Discard an update that the rule does not use."""
        self._received.pop((client, dispatch), None)

    def begin(self, wanted: SumUp, present: Set[str]) -> SumBegun | SumLost:
        """Begin a sum of updates that were received. `present`: clients that can answer."""
        summands, lost_by = [], {}
        for used in wanted.contributions:
            key = used.client, used.dispatch
            received = self._received.pop(key)
            summands.append(Summand(*key, used.weight, received.masked))
            lost_by[key] = received.lost_by
        found = self.sums.begin(summands, lost_by)
        found.holders &= present
        self._wanted[found.number] = wanted
        if self.sums.is_lost(found):
            return self._lose(found)
        return SumBegun(found.number, found.holders, found.wanted)

    def is_waiting_for(self, client: str, number: int) -> bool:
        """Return whether sum `number` still needs an answer of `client`."""
        found = self.sums.waiting.get(number)
        return found is not None and client in found.holders and client not in found.answers

    def problem_with_shares(self, shares: Words) -> str | None:
        """Return why `shares` cannot be an answer; None if they can."""
        if shares.size != self.sums.code.length:
            return f"sum of shares has {shares.size} words, expected {self.sums.code.length}"
        return None

    def answer(self, number: int, client: str, shares: Words | None) -> SumOpened | SumLost | None:
        """Handle the answer of `client` about sum `number`. `shares`: the sum of the client's shares;
        None if the client cannot make it. Return the opened or lost sum; None if the sum still waits for
        answers or has already ended."""
        found = self.sums.answer(number, client, shares)
        if found is None:
            return None
        if self.sums.is_complete(found):
            return self._open(found)
        return self._lose(found) if self.sums.is_lost(found) else None

    def remove_client(self, client: str) -> list[SumLost]:
        """Remove the shares of a client that has left; return the sums that are lost as a result."""
        for received in self._received.values():
            received.lost_by.add(client)
        return [
            self._lose(found) for found in self.sums.remove_client(client) if self.sums.is_lost(found)
        ]

    def give_up(self, number: int) -> SumLost:
        """Give up sum `number` because its timeout has passed."""
        return self._lose(self.sums.waiting[number])

    def problems(self, arrivals: Iterable[tuple[str, int]]) -> Iterator[str]:
        """Yield a sentence for each inconsistency of this state. `arrivals`: client and dispatch of the
        updates that have arrived and are not applied yet."""
        summed = [
            (used.client, used.dispatch)
            for wanted in self._wanted.values()
            for used in wanted.contributions
        ]
        if sorted([*self._received, *summed]) != sorted(arrivals):
            yield f"{[*self._received]} wait for a sum, {summed} are in one, and {[*arrivals]} arrived"
        if self.sums.waiting.keys() != self._wanted.keys():
            yield f"the sums {[*self.sums.waiting]} wait, and {[*self._wanted]} are wanted"

    def _open(self, found: Sum) -> SumOpened | SumLost:
        wanted, largest = self._wanted.pop(found.number), self.sums.settings.largest_weight
        total = self.sums.open(found)
        if isinstance(total, str):
            reason = f"is lost because an update or an answer was wrong: {total}"
            return SumLost(found.number, wanted, reason, tuple(sorted(found.answers)))
        used = tuple(
            replace(one, weight=found.weights[one.client, one.dispatch] / largest)
            for one in wanted.contributions
        )
        return SumOpened(found.number, replace(wanted, contributions=used), total)

    def _lose(self, found: Sum) -> SumLost:
        del self.sums.waiting[found.number]
        reason = (
            f"is lost: {len(found.answers)} of {len(found.holders)} possible clients have answered, "
            f"expected at least {self.sums.settings.needed} answers"
        )
        return SumLost(found.number, self._wanted.pop(found.number), reason)
