"""Secure aggregation as a step of the update pipeline: an update is rounded and masked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import numpy as np

from agents.client.randomness import ROUNDING
from agents.models.vectors import Vector
from agents.pipeline.interface import (
    ClientContext,
    ClientStep,
    Exchange,
    ExchangeCost,
    SimulatedExchange,
    UpdateStep,
)
from agents.pipeline.secure.coding import code_of
from agents.pipeline.secure.masked_update import FIELD, Masked
from agents.pipeline.secure.quantisation import Grid
from agents.pipeline.secure.secure_messages import share_size
from agents.pipeline.secure.server import SecureSums
from agents.pipeline.secure.settings import SecureRun
from agents.pipeline.secure.simulated import SimulatedParty
from agents.pipeline.secure.sums import MaskedSums
from agents.wire.payloads import Encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureAggregation(SecureRun, UpdateStep):
    """Step that rounds and masks updates for the secure aggregation of one run."""

    field: ClassVar[str | None] = FIELD

    def at_client(self, client: ClientContext) -> Masking:
        rng = partial(client.rng, ROUNDING)
        if client.simulated:
            simulated = SimulatedParty(client.name, self, client.parameters)
            return Masking(simulated, self.grid, rng, simulated=simulated)
        from agents.pipeline.secure.party import Party  # with cryptography, which takes time to import

        party = Party(client.run, client.name, self, client.parameters)
        return Masking(party, self.grid, rng, exchange=party)

    def at_server(self, parameters: int) -> SecureSums:
        return SecureSums(MaskedSums(self, parameters))

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
        from agents.pipeline.secure.cost import measure_cost  # imports cryptography, which takes time

        return measure_cost(self, parameters)

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
