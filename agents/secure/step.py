"""Secure aggregation as a step of the update pipeline, in real time and in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import numpy as np

from agents.models.vectors import Vector
from agents.pipeline.interface import (
    ClientContext,
    ClientStep,
    Exchange,
    ExchangeCost,
    SimulatedExchange,
    UpdateStep,
    Wanted,
)
from agents.random_generators import ROUNDING
from agents.secure.arithmetic import Grid, SecureRun, code_of
from agents.secure.secure_messages import (
    DIVERGED,
    HOLDERS,
    Masked,
    encode_sum,
    share_size,
)
from agents.secure.server import SecureSums
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.payloads import Encoded

_MASKS = 3
"""Maximum number of own masks: for the running training and for updates that wait to be sent."""


class SimulatedParty:
    """The client `name`, for models of `size` parameters."""

    def __init__(self, name: str, settings: SecureRun, size: int) -> None:
        self._name = name
        self._places = {client: place for place, client in enumerate(settings.clients)}
        self._grid = Grid(settings.range, settings.bits)
        self._length = code_of(settings, size).length
        self.share_size = share_size(self._length)
        self._masks: dict[int, tuple[tuple[int, ...], Nanoseconds]] = {}
        """By dispatch: holders of the shares, and nanoseconds to make the mask."""
        self._held: set[tuple[str, int]] = set()
        """Client and dispatch of each share that this client holds."""

    def prepare(self, dispatch: int, present: Iterable[str], took: Nanoseconds) -> int:
        holders = sorted(self._places[client] for client in {*present, self._name})
        self._masks[dispatch] = tuple(holders), took
        while len(self._masks) > _MASKS:
            del self._masks[min(self._masks)]
        self.receive_share(self._name, dispatch)
        return len(holders) - 1

    def receive_share(self, sender: str, dispatch: int) -> None:
        self._held.add((sender, dispatch))

    def answer(self, number: int, wanted: Wanted) -> bytes:
        keys = {(client, dispatch) for client, dispatch, _ in wanted}
        if not keys <= self._held:
            return encode_sum(number, None)
        self._held -= keys
        return encode_sum(number, np.zeros(self._length, np.uint32))

    def masked(self, dispatch: int, vector: Vector, rng: np.random.Generator) -> Masked:
        """`vector`: shape (d,). `rng`: for the random rounding."""
        holders, took = self._masks.pop(dispatch)
        try:
            words, outside = self._grid.round(vector, rng)
        except ValueError:
            words, outside = np.zeros(vector.size, np.uint32), DIVERGED
        return Masked(words, holders, outside, took)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureAggregation(SecureRun, UpdateStep):
    """Step that rounds and masks updates for the secure aggregation of one run."""

    field: ClassVar[str | None] = HOLDERS

    def at_client(self, client: ClientContext) -> Masking:
        rng = partial(client.rng, ROUNDING)
        if client.simulated:
            simulated = SimulatedParty(client.name, self, client.parameters)
            return Masking(simulated, self.grid, rng, simulated=simulated)
        from agents.secure.party import Party  # with cryptography, which takes time to import

        party = Party(client.run, client.name, self, client.parameters)
        return Masking(party, self.grid, rng, exchange=party)

    def at_server(self, parameters: int) -> SecureSums:
        return SecureSums(self, parameters)

    @property
    def grid(self) -> Grid:
        return Grid(self.range, self.bits)

    def memory(self, model: int, *, remembers: bool) -> int:
        """Bytes for a mask, for its blocks and shares while they are made, and for the shares of other
        clients' masks; with the updates that may still be lost if the client remembers what it sent.
        Computed, not measured."""
        held = self.needed + len(self.clients) + self.most_shares
        sent = self.updates if remembers else 0
        return model * (1 + sent) + math.ceil(model / (self.needed - self.colluding)) * held

    def exchange_cost(self, parameters: int) -> ExchangeCost:
        from agents.secure.party import measure_cost  # imports cryptography, which takes time

        return measure_cost(self, parameters)

    def waiting_models(self) -> tuple[float, int]:
        """Shares for each client, for every update that may be in flight."""
        shares = (self.updates + len(self.clients)) / (self.needed - self.colluding)
        return shares, max(1, self.colluding)

    def exchanged_bytes(self, parameters: int) -> int:
        """Shares that a client sends per round."""
        return (len(self.clients) - 1) * share_size(code_of(self, parameters).length)


class _Masks(Protocol):
    def masked(self, dispatch: int, vector: Vector, rng: np.random.Generator) -> Masked: ...


class Masking(ClientStep):
    """Rounding and masking at one client. `rng` returns the generator for the rounding of update
    `sequence`."""

    def __init__(
        self,
        masks: _Masks,
        grid: Grid,
        rng: Callable[[int], np.random.Generator],
        exchange: Exchange | None = None,
        simulated: SimulatedExchange | None = None,
    ) -> None:
        self._masks, self._grid, self._rng = masks, grid, rng
        self.exchange, self.simulated_exchange = exchange, simulated

    def apply(self, progress: Vector, sequence: int, dispatch: int) -> Encoded:
        return self._masks.masked(dispatch, progress, self._rng(sequence)).encoded

    def as_sent(self, sequence: int, dispatch: int, change: Vector) -> Vector:
        return self._grid.as_sent(change, self._rng(sequence))
