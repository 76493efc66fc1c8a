"""Local trainings of the clients in flight, computed together when the first result is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agents.client.core import Outcome
from agents.config import Local
from agents.vectors import Vector
from testbed.virtual.training import BatchTrainer, Job


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """One training; implements `testbed.virtual.device.Training`."""

    pool: Pool
    start: Vector
    """Shape (d,); not changed."""
    indices: NDArray[np.int64]
    """The client's samples."""
    local: Local
    lr: float
    steps: int
    rng: Callable[[], np.random.Generator]
    """A generator of its own, the same at each call."""
    result: Outcome | None = None

    def outcome(self) -> Outcome:
        if self.steps == 0:
            return Outcome(self.start, math.nan)
        if self.result is None:
            self.pool.compute(self)
        assert self.result is not None  # noqa: S101  (computed by now)
        return self.result

    def cut(self, steps: int) -> None:
        """Only `steps` steps are done: a result that was computed for all of them is void."""
        if steps != self.steps:
            self.steps, self.result = steps, None

    def wanted(self) -> None:
        self.pool.add(self)


@dataclass(slots=True)
class Pool:
    """Tickets that wait to be computed. With `lazily`, only those that are wanted: what clients keep in
    their send buffers may never be fetched."""

    trainer: BatchTrainer
    gradient: bool
    lazily: bool
    _pending: dict[Ticket, None] = field(default_factory=dict)

    def hand_in(self, ticket: Ticket) -> Ticket:
        """A training begins."""
        if not self.lazily:
            self.add(ticket)
        return ticket

    def add(self, ticket: Ticket) -> None:
        """The ticket's result will be needed."""
        if ticket.result is None and ticket.steps:
            self._pending[ticket] = None

    def compute(self, ticket: Ticket) -> None:
        """Compute `ticket`, and all that waits with it."""
        self.add(ticket)
        tickets = list(self._pending)
        self._pending.clear()
        jobs = [
            Job(
                start=t.start,
                indices=t.indices,
                local=t.local,
                lr=t.lr,
                steps=t.steps,
                rng=t.rng(),
                gradient=self.gradient,
            )
            for t in tickets
        ]
        for done, result in zip(tickets, self.trainer.run(jobs), strict=True):
            done.result = Outcome(result.end, result.loss)
