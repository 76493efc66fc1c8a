"""The sums that the rule has asked for where updates come masked: what each is made of, and what becomes
of it. Pure.

A masked update waits for the sum that it is to go into. A sum waits for the shares of its masks: it is
`Opened` as soon as enough clients have answered, and `Lost` as soon as too few are left that can, or
where what is opened is no sum of such updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agents.models.vectors import Vector
from agents.pipeline.interface import BASE_LACKS, Asked, Lost, Opened, SummingStep
from agents.pipeline.secure.field import Words
from agents.pipeline.secure.masked import Masked
from agents.pipeline.secure.secure_messages import sum_size
from agents.pipeline.secure.sums import Sum, Summand, Sums
from agents.rules.interface import SumUp
from agents.timing.nanoseconds import from_seconds, to_seconds
from agents.wire.payloads import Encoded, UpdateMessage

_NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class _Received:
    """An update that waits for its sum."""

    masked: Masked
    lost_by: set[str] = field(default_factory=set)
    """Clients that have left since, and with them their shares of its mask."""


class SecureSums(SummingStep):
    missing = "not masked, in a run with secure aggregation"

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self.timeout = from_seconds(sums.settings.timeout)
        self.answer_size = sum_size(sums.code.length)
        self._received: dict[tuple[str, int], _Received] = {}
        """By client and dispatch."""
        self._wanted: dict[int, SumUp] = {}
        """By number of those that are waiting."""

    @property
    def waiting(self) -> Set[int]:
        """Numbers of the sums that are neither opened nor lost."""
        return self._wanted.keys()

    def received(
        self, client: str, message: UpdateMessage, encoded: Encoded, base: Vector | None
    ) -> Vector | str:
        """What is known of a masked update: of a model, what it was trained from."""
        try:
            masked = Masked.of(encoded)
        except ValueError as error:
            return f"masked: {error}"
        if (problem := self._sums.unfit(masked)) is not None:
            return problem
        if not 0 <= masked.took <= message.sent - message.downloaded:
            return "a mask that took longer than the round, or less than no time"
        if message.kind == "model" and base is None:
            return f"masked, and {BASE_LACKS}"
        self._received[client, message.dispatch] = _Received(masked)
        return base if message.kind == "model" and base is not None else _NOTHING

    def facts(self, client: str, dispatch: int) -> Mapping[str, Any]:
        masked = self._received[client, dispatch].masked
        return {"masking": to_seconds(masked.took), "outside": masked.outside}

    def drop(self, client: str, dispatch: int) -> None:
        self._received.pop((client, dispatch), None)

    def begin(self, wanted: SumUp, present: Set[str]) -> Asked | Lost:
        summands, lost_by = [], {}
        for used in wanted.contributions:
            key = used.client, used.dispatch
            received = self._received.pop(key)
            summands.append(Summand(*key, used.weight, received.masked))
            lost_by[key] = received.lost_by
        found = self._sums.begin(summands, lost_by)
        found.holders &= present
        self._wanted[found.number] = wanted
        if self._sums.lost(found):
            return self._lose(found)
        return Asked(found.number, found.holders, found.wanted)

    def awaits(self, client: str, number: int) -> bool:
        found = self._sums.waiting.get(number)
        return found is not None and client in found.holders and client not in found.answers

    def unfit(self, shares: Words) -> str | None:
        if shares.size != self._sums.code.length:
            return f"a sum of shares of {shares.size} words"
        return None

    def answer(self, number: int, client: str, shares: Words | None) -> Opened | Lost | None:
        """An answer that comes late, as enough others were faster, is of no use."""
        found = self._sums.answer(number, client, shares)
        if found is None:
            return None
        if self._sums.complete(found):
            return self._open(found)
        return self._lose(found) if self._sums.lost(found) else None

    def gone(self, client: str) -> list[Lost]:
        for received in self._received.values():
            received.lost_by.add(client)
        return [self._lose(found) for found in self._sums.gone(client) if self._sums.lost(found)]

    def give_up(self, number: int) -> Lost:
        return self._lose(self._sums.waiting[number])

    def _open(self, found: Sum) -> Opened | Lost:
        wanted, largest = self._wanted.pop(found.number), self._sums.settings.largest_weight
        total = self._sums.opened(found)
        if isinstance(total, str):
            reason = f"is lost, as an update or an answer was wrong: {total}"
            return Lost(found.number, wanted, reason, tuple(sorted(found.answers)))
        used = tuple(
            replace(one, weight=found.weights[one.client, one.dispatch] / largest)
            for one in wanted.contributions
        )
        return Opened(found.number, replace(wanted, contributions=used), total)

    def _lose(self, found: Sum) -> Lost:
        del self._sums.waiting[found.number]
        reason = (
            f"is lost: {len(found.answers)} of {self._sums.settings.needed} clients that are needed "
            f"have answered, and {len(found.holders)} could"
        )
        return Lost(found.number, self._wanted.pop(found.number), reason)
