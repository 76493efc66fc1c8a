"""The server's side of secure aggregation: masked updates, and their weighted sums. No I/O and no
clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agents import events
from agents.aggregator.actions import Log
from agents.models import vectors
from agents.models.vectors import Vector, norm
from agents.pipeline.interface import BASE_LACKS, ServerStep
from agents.pipeline.secure.arithmetic import FIELD, Grid, Words, code_of, whole_weights
from agents.pipeline.secure.secure_messages import DIVERGED, Masked, sum_size
from agents.pipeline.secure.settings import SecureRun
from agents.rules.interface import SumUp
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from agents.wire.payloads import Encoded, UpdateMessage

_ROUNDING = 1e-4
"""Relative error allowed for norms of float32 vectors."""


@dataclass(frozen=True, slots=True, eq=False)
class Summand:
    client: str
    dispatch: int
    weight: float
    """Weight from 0 to 1."""
    masked: Masked


@dataclass(slots=True)
class Sum:
    """Masked sum of a buffer, which waits for the clients' answers."""

    number: int
    words: Words
    """Σ a_i (update_i + mask_i) with integer weights a_i, shape (d,)."""
    weights: Mapping[tuple[str, int], int]
    """Integers a_i, by client and dispatch."""
    holders: set[str]
    """Clients that have answered or can still answer."""
    answers: dict[str, Words] = field(default_factory=dict)
    """Sums of shares, by client."""

    @property
    def wanted(self) -> list[tuple[str, int, int]]:
        """Client, dispatch and weight, for the requests to the holders."""
        return [(client, dispatch, weight) for (client, dispatch), weight in self.weights.items()]


class MaskedSums:
    """Sums that wait for answers. `size`: number of the model's parameters."""

    def __init__(self, settings: SecureRun, size: int) -> None:
        self.settings = settings
        self.code = code_of(settings, size)
        self.grid = Grid(settings.range, settings.bits)
        self.waiting: dict[int, Sum] = {}
        self._places = {client: place for place, client in enumerate(settings.clients)}
        self._begun = 0

    def problem_with(self, masked: Masked) -> str | None:
        """Why an update cannot be summed; None if it can."""
        if masked.words.size != self.code.size:
            return f"another model: {masked.words.size} parameters, expected {self.code.size}"
        if int(masked.words.max()) >= FIELD.p:
            return f"word {int(masked.words.max())} is not below p = {FIELD.p}"
        if masked.outside == DIVERGED:
            return vectors.DIVERGED
        if not 0 <= masked.outside <= self.code.size:
            return f"outside is {masked.outside}, expected from 0 to {self.code.size}"
        if any(place >= len(self._places) for place in masked.holders):
            return "holders: a client that is not in this run"
        if len(masked.holders) < self.settings.needed:
            return (
                f"only {len(masked.holders)} clients have a share of its mask, expected at least "
                f"{self.settings.needed}: too many clients are absent"
            )
        return None

    def begin(self, summands: Sequence[Summand], away: Mapping[tuple[str, int], Iterable[str]]) -> Sum:
        """`away`: clients that have lost their share of a mask, by client and dispatch of the update."""
        weights = [summand.weight for summand in summands]
        whole = whole_weights(weights, self.settings.largest_weight)
        total = np.zeros(self.code.size, np.uint64)
        holders = set(self.settings.clients)
        for summand, weight in zip(summands, whole, strict=True):
            total += summand.masked.words.astype(np.uint64) * np.uint64(weight)
            names = {self.settings.clients[place] for place in summand.masked.holders}
            holders &= names.difference(away.get((summand.client, summand.dispatch), ()))
        self._begun += 1
        keys = ((summand.client, summand.dispatch) for summand in summands)
        begun = Sum(
            self._begun,
            FIELD.reduce(total).astype(np.uint32),
            dict(zip(keys, whole, strict=True)),
            holders,
        )
        self.waiting[begun.number] = begun
        return begun

    def answer(self, number: int, client: str, shares: Words | None) -> Sum | None:
        """`shares`: None if the client cannot make the sum. Return the masked sum; None if it does not
        wait for this client."""
        found = self.waiting.get(number)
        if found is None or client not in found.holders or client in found.answers:
            return None
        if shares is None:
            found.holders.discard(client)
        else:
            found.answers[client] = shares
        return found

    def remove_client(self, client: str) -> list[Sum]:
        """The client has lost its shares. Return the sums that waited for it."""
        touched = []
        for found in self.waiting.values():
            if client in found.holders and client not in found.answers:
                found.holders.discard(client)
                touched.append(found)
        return touched

    def is_lost(self, found: Sum) -> bool:
        """Too few clients are left that can answer."""
        return len(found.holders) < self.settings.needed

    def is_complete(self, found: Sum) -> bool:
        return len(found.answers) >= self.settings.needed

    def open(self, found: Sum) -> Vector | str:
        """The sum with weights a_i/A, A the largest possible one, float64, shape (d,), or why the result
        cannot be such a sum: an update or an answer was wrong. A single wrong word of an answer makes
        coordinates of the sum wrong."""
        clients = sorted(found.answers, key=self._places.__getitem__)[: self.settings.needed]
        shares = np.stack([found.answers[client] for client in clients])
        mask = self.code.mask([self._places[client] for client in clients], shares)
        del self.waiting[found.number]
        whole = self.grid.to_integers(FIELD.difference(found.words, mask))
        most = self.grid.levels * sum(found.weights.values())
        if max(int(whole.max()), -int(whole.min())) > most:
            count = np.count_nonzero(np.abs(whole) > most)
            return f"{count:,} of {whole.size:,} coordinates are larger than its updates can add up to"
        total: Vector = whole * self.grid.step / self.settings.largest_weight
        if (bound := self.settings.norm) is not None:
            bound *= sum(found.weights.values()) / self.settings.largest_weight
            if (length := norm(total)) > bound * (1 + _ROUNDING):
                return f"its norm is {length:.3g}, but its clipped updates add up to {bound:.3g} at most"
        return total


# Server half of secure aggregation: masked updates, and the sums that the rule requests.
#
# A masked update waits until the rule puts it into a sum. A sum waits for the clients' answers, each a
# sum of shares of the masks. It is opened (`SumOpened`) when enough clients have answered, and lost
# (`SumLost`) when too few are left that can answer, or when the opened vector cannot be a sum of valid
# updates.

_NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class SumBegun:
    """Waits for the answers of the clients `holders`."""

    number: int
    holders: Set[str]
    updates: list[tuple[str, int, int]]
    """Client, dispatch and weight of each update."""


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
    def __init__(self, sums: MaskedSums) -> None:
        self.sums = sums
        self.answer_size = sum_size(sums.code.length)
        """Maximum bytes of a client's answer."""
        self._received: dict[tuple[str, int], _WaitingUpdate] = {}
        """Updates that are not in a sum yet, by client and dispatch."""
        self._wanted: dict[int, SumUp] = {}
        """Requests whose sums wait for the clients' answers, by number."""

    @property
    def waiting(self) -> Set[int]:
        return self._wanted.keys()

    @property
    def timeout(self) -> Nanoseconds:
        """A sum that is not opened in this time after its shares were requested is lost."""
        return from_seconds(self.sums.settings.timeout)

    def receive(
        self, client: str, message: UpdateMessage, encoded: Encoded, base: Vector | None
    ) -> Vector | str:
        """Keep a masked update until it is put into a sum. Return `base` for an update of kind `model`,
        an empty vector for any other, or the reason to reject it."""
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
        """The rule does not use the update."""
        self._received.pop((client, dispatch), None)

    def begin(self, wanted: SumUp, present: Set[str]) -> SumBegun | SumLost:
        """`present`: clients that can answer."""
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
        found = self.sums.waiting.get(number)
        return found is not None and client in found.holders and client not in found.answers

    def problem_with_shares(self, shares: Words) -> str | None:
        """Why `shares` cannot be an answer; None if they can."""
        if shares.size != self.sums.code.length:
            return f"sum of shares has {shares.size} words, expected {self.sums.code.length}"
        return None

    def answer(self, number: int, client: str, shares: Words | None) -> SumOpened | SumLost | None:
        """`shares`: None if the client cannot make the sum. Return the opened or lost sum; None if it
        still waits for answers or has ended."""
        found = self.sums.answer(number, client, shares)
        if found is None:
            return None
        if self.sums.is_complete(found):
            return self._open(found)
        return self._lose(found) if self.sums.is_lost(found) else None

    def remove_client(self, client: str) -> list[SumLost]:
        """The client has left, with its shares. Return the sums that are lost as a result."""
        for received in self._received.values():
            received.lost_by.add(client)
        return [
            self._lose(found) for found in self.sums.remove_client(client) if self.sums.is_lost(found)
        ]

    def give_up(self, number: int) -> SumLost:
        """The timeout has passed."""
        return self._lose(self.sums.waiting[number])

    def problems(self, arrivals: Iterable[tuple[str, int]]) -> Iterator[str]:
        """Yield a sentence for each inconsistency. `arrivals`: client and dispatch of updates that are
        not applied yet."""
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
