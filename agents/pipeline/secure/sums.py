"""The server's side of secure aggregation: weighted sums of masked updates. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agents.models import vectors
from agents.models.vectors import Vector, norm
from agents.pipeline.secure.coding import code_of
from agents.pipeline.secure.field import FIELD, Words
from agents.pipeline.secure.masked_update import DIVERGED, Masked
from agents.pipeline.secure.quantisation import Grid, whole_weights
from agents.pipeline.secure.settings import SecureRun

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
