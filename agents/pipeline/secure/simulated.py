"""A client's side of secure aggregation in virtual time: shares have a size but no content, and masks
are zeros, because nothing has to be hidden. Rounding and sums are as in real time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from agents.models.vectors import Vector
from agents.pipeline.interface import Wanted
from agents.pipeline.secure.coding import code_of
from agents.pipeline.secure.field import Words
from agents.pipeline.secure.masked_update import DIVERGED, Masked
from agents.pipeline.secure.quantisation import Grid
from agents.pipeline.secure.secure_messages import LACKING, share_size, sum_size
from agents.pipeline.secure.settings import SecureRun
from agents.timing.nanoseconds import Nanoseconds

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

    def answer(self, wanted: Wanted) -> tuple[int, Words | None]:
        keys = {(client, dispatch) for client, dispatch, _ in wanted}
        if not keys <= self._held:
            return sum_size(LACKING), None
        self._held -= keys
        return sum_size(self._length), np.zeros(self._length, np.uint32)

    def masked(self, dispatch: int, vector: Vector, rng: np.random.Generator) -> Masked:
        """`vector`: shape (d,). `rng`: for the random rounding."""
        holders, took = self._masks.pop(dispatch)
        try:
            words, outside = self._grid.round(vector, rng)
        except ValueError:
            words, outside = np.zeros(vector.size, np.uint32), DIVERGED
        return Masked(words, holders, outside, took)
