"""The sums that the rule has asked for where updates come masked: what each is made of, and what becomes
of it. Pure.

A masked update waits for the sum that it is to go into. A sum waits for the shares of its masks: it is
`Opened` as soon as enough clients have answered, and `Lost` as soon as too few are left that can, or
where what is opened is no sum of such updates.
"""

from __future__ import annotations

from collections import deque
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

_MAX_ASKED = 256


@dataclass(frozen=True, slots=True)
class SumBegun:
    """Sum `number` waits for the shares of `holders`."""

    number: int
    holders: Set[str]
    updates: list[tuple[str, int, int]]
    """Client, dispatch and weight of each update in it."""


@dataclass(frozen=True, slots=True, eq=False)
class SumOpened:
    number: int
    wanted: SumUp
    """With the weights that the updates have in `total`."""
    total: Vector
    """float64, shape (d,)."""


@dataclass(frozen=True, slots=True, eq=False)
class SumLost:
    number: int
    wanted: SumUp
    """Nothing comes of its updates."""
    reason: str
    """What follows `its buffer`."""
    answered: tuple[str, ...] = ()
    """Clients whose answers opened a sum that is wrong; none: it was not opened."""

    def records(self, at: float) -> list[Log]:
        """What is recorded of it as a whole, at `at` seconds."""
        what = f"a buffer of {len(self.wanted.contributions)} updates {self.reason}"
        if not self.answered:
            return [Log(events.Note(at, what))]
        senders = tuple(sorted({used.client for used in self.wanted.contributions}))
        wrong = events.WrongSum(at, senders, self.answered)
        return [Log(wrong), Log(events.Note(at, f"{what}; {wrong.senders}"))]


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingUpdate:
    """An update that waits for its sum."""

    masked: Masked
    lost_by: set[str] = field(default_factory=set)
    """Clients that have left since, and with them their shares of its mask."""


class SecureSums(ServerStep):
    def __init__(self, sums: MaskedSums) -> None:
        self.sums = sums
        self.answer_size = sum_size(sums.code.length)
        """Bytes of an answer of a client, at most."""
        self._received: dict[tuple[str, int], _WaitingUpdate] = {}
        """By client and dispatch."""
        self._wanted: dict[int, SumUp] = {}
        """By number of those that are waiting."""
        self._asked: dict[str, deque[int]] = {}
        """By client: the latest sums that it was asked about and has not answered."""

    @property
    def waiting(self) -> Set[int]:
        """Numbers of the sums that are neither opened nor lost."""
        return self._wanted.keys()

    @property
    def timeout(self) -> Nanoseconds:
        """From when shares were asked for: what has not been opened by then is lost."""
        return from_seconds(self.sums.settings.timeout)

    def receive(
        self, client: str, message: UpdateMessage, encoded: Encoded, base: Vector | None
    ) -> Vector | str:
        """What is known of a masked update: of a model, what it was trained from. It waits for its
        sum."""
        try:
            masked = Masked.from_encoded(encoded)
        except ValueError as error:
            return f"masked: {error}"
        if (problem := self.sums.problem_with(masked)) is not None:
            return problem
        if not 0 <= masked.took <= message.sent - message.downloaded:
            return "a mask that took longer than the round, or less than no time"
        if message.kind == "model" and base is None:
            return f"masked, and {BASE_LACKS}"
        self._received[client, message.dispatch] = _WaitingUpdate(masked)
        return base if message.kind == "model" and base is not None else _NOTHING

    def record_fields(self, client: str, dispatch: int) -> dict[str, Any]:
        """Fields of the record of an update that waits (`agents.events.UpdateApplied`)."""
        masked = self._received[client, dispatch].masked
        return {"masking": to_seconds(masked.took), "outside": masked.outside}

    def drop(self, client: str, dispatch: int) -> None:
        """The rule has no use for that update."""
        self._received.pop((client, dispatch), None)

    def begin(self, wanted: SumUp, present: Set[str]) -> SumBegun | SumLost:
        """A sum of updates that were received; `present` are those who can answer."""
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
        for client in found.holders:
            self._asked.setdefault(client, deque(maxlen=_MAX_ASKED)).append(found.number)
        return SumBegun(found.number, found.holders, found.wanted)

    def note_answer(self, client: str, number: int) -> bool:
        """`client` answers about sum `number`; return whether it was asked and had not answered."""
        asked = self._asked.get(client, ())
        if number not in asked:
            return False
        self._asked[client].remove(number)
        return True

    def is_waiting_for(self, client: str, number: int) -> bool:
        """Whether the shares of `client` for sum `number` are of use."""
        found = self.sums.waiting.get(number)
        return found is not None and client in found.holders and client not in found.answers

    def problem_with_shares(self, shares: Words) -> str | None:
        """Why they are no shares of a sum, or None."""
        if shares.size != self.sums.code.length:
            return f"a sum of shares of {shares.size} words"
        return None

    def answer(self, number: int, client: str, shares: Words | None) -> SumOpened | SumLost | None:
        """What comes of sum `number` as `client` has answered, None if it cannot. An answer that comes
        late, as enough others were faster, is of no use."""
        found = self.sums.answer(number, client, shares)
        if found is None:
            return None
        if self.sums.is_complete(found):
            return self._open(found)
        return self._lose(found) if self.sums.is_lost(found) else None

    def remove_client(self, client: str) -> list[SumLost]:
        """`client` has left: the sums that cannot be opened without it."""
        for received in self._received.values():
            received.lost_by.add(client)
        return [
            self._lose(found) for found in self.sums.remove_client(client) if self.sums.is_lost(found)
        ]

    def give_up(self, number: int) -> SumLost:
        """Sum `number`, which is waiting, has waited for too long."""
        return self._lose(self.sums.waiting[number])

    def problems(self, arrivals: Iterable[tuple[str, int]]) -> Iterator[str]:
        """What cannot be in this state. `arrivals`: client and dispatch of the updates that wait to be
        applied."""
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
            reason = f"is lost, as an update or an answer was wrong: {total}"
            return SumLost(found.number, wanted, reason, tuple(sorted(found.answers)))
        used = tuple(
            replace(one, weight=found.weights[one.client, one.dispatch] / largest)
            for one in wanted.contributions
        )
        return SumOpened(found.number, replace(wanted, contributions=used), total)

    def _lose(self, found: Sum) -> SumLost:
        del self.sums.waiting[found.number]
        reason = (
            f"is lost: {len(found.answers)} of {self.sums.settings.needed} clients that are needed "
            f"have answered, and {len(found.holders)} could"
        )
        return SumLost(found.number, self._wanted.pop(found.number), reason)
