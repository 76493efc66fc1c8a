"""The server's side of secure aggregation: masked updates, and their weighted sums. No I/O and no
clock.

A masked update waits until the rule puts it into a sum. A sum waits for the clients' answers, each a sum
of shares of the masks. It is opened (`SumOpened`) when enough clients have answered, and lost
(`SumLost`) when too few are left that can answer, or when the opened vector cannot be a sum of valid
updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from agents import events
from agents.aggregator.actions import Action, Log
from agents.aggregator.part import PartHost
from agents.models import vectors
from agents.models.vectors import Vector, norm
from agents.pipeline.interface import BASE_LACKS, ServerStep
from agents.rules.interface import SumUp
from agents.secure.arithmetic import FIELD, Grid, SecureRun, Words, code_of, whole_weights
from agents.secure.secure_messages import DIVERGED, Masked, SecureWireError, decode_sum, sum_size
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from agents.wire.messages import UnmaskRequest
from agents.wire.payloads import Encoded, UpdateMessage

_ROUNDING = 1e-4
"""Relative error allowed for norms of float32 vectors."""
_NOTHING = np.zeros(0, np.float32)
_TIMEOUT = "shares"
"""Name of the timers at which sums are given up, with their numbers."""


@dataclass(slots=True, eq=False)
class SumBegun:
    """Waits for the clients' answers."""

    number: int
    wanted: SumUp
    words: Words
    """Σ a_i (update_i + mask_i), shape (d,)."""
    weights: Sequence[int]
    """Integers a_i, in the order of `wanted.contributions`."""
    holders: set[str]
    """Clients that have answered or can still answer."""
    answers: dict[str, Words] = field(default_factory=dict)
    """Sums of shares, by client."""

    @property
    def updates(self) -> list[tuple[str, int, int]]:
        """Client, dispatch and weight of each update, for the requests to the holders."""
        pairs = zip(self.wanted.contributions, self.weights, strict=True)
        return [(used.client, used.dispatch, weight) for used, weight in pairs]


@dataclass(frozen=True, slots=True, eq=False)
class SumOpened:
    number: int
    wanted: SumUp
    """With the weights that were used in `total`: secure aggregation rounds them."""
    total: Vector
    """float64, shape (d,)."""


@dataclass(frozen=True, slots=True, eq=False)
class SumLost:
    """The updates in the sum are lost, too."""

    number: int
    wanted: SumUp
    reason: str
    """End of a sentence about the sum, such as `is lost: ...`."""
    answered: tuple[str, ...] = ()
    """Clients whose answers opened a wrong sum; empty if it was not opened."""

    def records(self, at: float) -> list[Log]:
        """`at`: seconds."""
        what = f"a buffer of {len(self.wanted.contributions)} updates {self.reason}"
        if not self.answered:
            return [Log(events.Note(at, what))]
        senders = tuple(sorted({used.client for used in self.wanted.contributions}))
        wrong = events.WrongSum(at, senders, self.answered)
        return [Log(wrong), Log(events.Note(at, f"{what}; {wrong.senders}"))]


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingUpdate:
    """Not in a sum yet."""

    masked: Masked
    lost_by: set[str] = field(default_factory=set)
    """Clients that have left since the update arrived, with their shares of its mask."""


class SecureSums(ServerStep):
    """`size`: number of the model's parameters."""

    sums_only: ClassVar[str] = "not masked, but the run uses secure aggregation"

    def __init__(self, settings: SecureRun, size: int) -> None:
        self._settings = settings
        self._code = code_of(settings, size)
        self.grid = Grid(settings.range, settings.bits)
        self.answer_size = sum_size(self._code.length)
        self._places = {client: place for place, client in enumerate(settings.clients)}
        self._received: dict[tuple[str, int], _WaitingUpdate] = {}
        """Updates that are not in a sum yet, by client and dispatch."""
        self.waiting: dict[int, SumBegun] = {}
        """Sums by their numbers."""
        self._begun = 0

    # What the core tells

    def receive(
        self, client: str, message: UpdateMessage, encoded: Encoded, base: Vector | None
    ) -> Vector | str:
        """Keep a masked update until it is put into a sum. Return `base` for an update of kind `model`,
        an empty vector for any other, or the reason to reject it."""
        try:
            masked = Masked.from_encoded(encoded)
        except ValueError as error:
            return f"masked: {error}"
        if (problem := self.problem_with(masked)) is not None:
            return problem
        if not 0 <= masked.took <= message.sent - message.downloaded:
            return "masking time out of range, expected from 0 to the duration of the round"
        if message.kind == "model" and base is None:
            return f"masked, but {BASE_LACKS}"
        self._received[client, message.dispatch] = _WaitingUpdate(masked)
        return base if message.kind == "model" and base is not None else _NOTHING

    def record_fields(self, client: str, dispatch: int) -> dict[str, Any]:
        masked = self._received[client, dispatch].masked
        return {"masking": to_seconds(masked.took), "outside": masked.outside}

    def drop_update(self, client: str, dispatch: int) -> None:
        self._received.pop((client, dispatch), None)

    def sum_up(self, wanted: SumUp, at: Nanoseconds, core: PartHost) -> list[Action]:
        """Request the sum of mask shares from each client that holds shares."""
        begun = self.begin(wanted, core.server.clients.keys())
        if not isinstance(begun, SumBegun):
            return self._settle(begun, at, core)
        core.timers.set(("part", _TIMEOUT, begun.number), at + from_seconds(self._settings.timeout))
        asked = core.server.in_device_order(begun.holders)
        return [UnmaskRequest(client, begun.number, begun.updates) for client in asked]

    def receive_answer(
        self, client: str, message: bytes | bytearray, at: Nanoseconds, core: PartHost
    ) -> list[Action]:
        """Ignore the answer if enough other clients have answered already."""
        try:
            number, shares = decode_sum(message)
        except SecureWireError as error:
            return core.refuse(client, str(error), at)
        if not self.is_waiting_for(client, number):
            return []
        if shares is not None and (problem := self.problem_with_shares(shares)) is not None:
            return core.refuse(client, problem, at)
        settled = self.answer(number, client, shares)
        return [] if settled is None else self._settle(settled, at, core)

    def lose_process(self, client: str, at: Nanoseconds, core: PartHost) -> list[Action]:
        lost = self.remove_client(client)
        return [action for one in lost for action in self._settle(one, at, core)]

    def fire(self, name: str, number: int, at: Nanoseconds, core: PartHost) -> list[Action]:
        return self._settle(self.give_up(number), at, core) if name == _TIMEOUT else []

    def problems(self, core: PartHost) -> Iterator[str]:
        arrived = [*core.arrivals]
        summed = [(client, n) for one in self.waiting.values() for client, n, _ in one.updates]
        if sorted([*self._received, *summed]) != sorted(arrived):
            yield f"{[*self._received]} wait for a sum, {summed} are in one, and {arrived} arrived"
        timed = {timer[-1] for timer in core.timers.names() if timer[:2] == ("part", _TIMEOUT)}
        if core.ended is None and timed != self.waiting.keys():
            yield f"timers of the sums {timed} are set, and {self.waiting.keys()} wait"

    def _settle(self, settled: SumOpened | SumLost, at: Nanoseconds, core: PartHost) -> list[Action]:
        """Pass an opened sum to the rule. For a lost sum, record that its updates are not applied."""
        core.timers.cancel(("part", _TIMEOUT, settled.number))
        wanted = settled.wanted
        if isinstance(settled, SumOpened):
            return core.carry_out([core.rule.apply_sum(wanted, settled.total)], at)
        reason, lost = f"its buffer {settled.reason}", list[Action]()
        for used in wanted.contributions:
            lost += core.lose_update(used.client, used.dispatch, reason, at)
        return [*lost, *settled.records(to_seconds(at))]

    # The sums

    def problem_with(self, masked: Masked) -> str | None:
        """Why an update cannot be summed; None if it can."""
        if masked.words.size != self._code.size:
            return f"another model: {masked.words.size} parameters, expected {self._code.size}"
        if int(masked.words.max()) >= FIELD.p:
            return f"word {int(masked.words.max())} is not below p = {FIELD.p}"
        if masked.outside == DIVERGED:
            return vectors.DIVERGED
        if not 0 <= masked.outside <= self._code.size:
            return f"outside is {masked.outside}, expected from 0 to {self._code.size}"
        if any(place >= len(self._places) for place in masked.holders):
            return "holders: a client that is not in this run"
        if len(masked.holders) < self._settings.needed:
            return (
                f"only {len(masked.holders)} clients have a share of its mask, expected at least "
                f"{self._settings.needed}: too many clients are absent"
            )
        return None

    def begin(self, wanted: SumUp, present: Set[str]) -> SumBegun | SumLost:
        """`present`: clients that can answer."""
        received = [self._received.pop((used.client, used.dispatch)) for used in wanted.contributions]
        weights = whole_weights([used.weight for used in wanted.contributions], self._settings.weights)
        holders = {*self._settings.clients} & present
        for one in received:
            holders &= {self._settings.clients[place] for place in one.masked.holders} - one.lost_by
        self._begun += 1
        words = weighted_sum([one.masked.words for one in received], weights)
        begun = SumBegun(self._begun, wanted, words, weights, holders)
        self.waiting[begun.number] = begun
        return self._lose(begun) if self._is_lost(begun) else begun

    def is_waiting_for(self, client: str, number: int) -> bool:
        found = self.waiting.get(number)
        return found is not None and client in found.holders and client not in found.answers

    def problem_with_shares(self, shares: Words) -> str | None:
        """Why `shares` cannot be an answer; None if they can."""
        if shares.size != self._code.length:
            return f"sum of shares has {shares.size} words, expected {self._code.length}"
        return None

    def answer(self, number: int, client: str, shares: Words | None) -> SumOpened | SumLost | None:
        """`shares`: None if the client cannot make the sum. Return the opened or lost sum; None if it
        still waits for answers, or does not wait for this client."""
        if not self.is_waiting_for(client, number):
            return None
        found = self.waiting[number]
        if shares is None:
            found.holders.discard(client)
            return self._lose(found) if self._is_lost(found) else None
        found.answers[client] = shares
        return self._open(found) if len(found.answers) >= self._settings.needed else None

    def remove_client(self, client: str) -> list[SumLost]:
        """The client has left, with its shares. Return the sums that are lost as a result."""
        for received in self._received.values():
            received.lost_by.add(client)
        touched = [one for one in self.waiting.values() if self.is_waiting_for(client, one.number)]
        for found in touched:
            found.holders.discard(client)
        return [self._lose(found) for found in touched if self._is_lost(found)]

    def give_up(self, number: int) -> SumLost:
        """The timeout has passed."""
        return self._lose(self.waiting[number])

    def open(self, found: SumBegun) -> Vector | str:
        """The sum with weights a_i/A, A the largest possible one, float64, shape (d,), or why the result
        cannot be such a sum: an update or an answer was wrong. A single wrong word of an answer makes
        coordinates of the sum wrong."""
        clients = sorted(found.answers, key=self._places.__getitem__)[: self._settings.needed]
        shares = np.stack([found.answers[client] for client in clients])
        mask = self._code.mask([self._places[client] for client in clients], shares)
        whole = self.grid.to_integers(FIELD.difference(found.words, mask))
        most = self.grid.levels * sum(found.weights)
        if max(int(whole.max()), -int(whole.min())) > most:
            count = np.count_nonzero(np.abs(whole) > most)
            return f"{count:,} of {whole.size:,} coordinates are larger than its updates can add up to"
        total: Vector = whole * self.grid.step / self._settings.weights
        if (bound := self._settings.norm) is not None:
            bound *= sum(found.weights) / self._settings.weights
            if (length := norm(total)) > bound * (1 + _ROUNDING):
                return f"its norm is {length:.3g}, but its clipped updates add up to {bound:.3g} at most"
        return total

    def _open(self, found: SumBegun) -> SumOpened | SumLost:
        del self.waiting[found.number]
        total, wanted = self.open(found), found.wanted
        if isinstance(total, str):
            reason = f"is lost because an update or an answer was wrong: {total}"
            return SumLost(found.number, wanted, reason, tuple(sorted(found.answers)))
        used = tuple(
            replace(one, weight=weight / self._settings.weights)
            for one, weight in zip(wanted.contributions, found.weights, strict=True)
        )
        return SumOpened(found.number, replace(wanted, contributions=used), total)

    def _is_lost(self, found: SumBegun) -> bool:
        """Too few clients are left that can answer."""
        return len(found.holders) < self._settings.needed

    def _lose(self, found: SumBegun) -> SumLost:
        del self.waiting[found.number]
        reason = (
            f"is lost: {len(found.answers)} of {len(found.holders)} possible clients have answered, "
            f"expected at least {self._settings.needed} answers"
        )
        return SumLost(found.number, found.wanted, reason)


def weighted_sum(words: Sequence[Words], weights: Sequence[int]) -> Words:
    total = np.zeros(words[0].size, np.uint64)
    for one, weight in zip(words, weights, strict=True):
        total += one.astype(np.uint64) * np.uint64(weight)
    return FIELD.reduce(total).astype(np.uint32)
