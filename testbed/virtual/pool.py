"""Local trainings in progress, computed together when the first result is needed."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from agents.client.core import Outcome
from agents.timing.nanoseconds import Nanoseconds
from testbed.virtual.stacked_training import BatchTrainer, Job


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket(Job):
    """Implements `testbed.virtual.device.LazyTraining`."""

    pool: Pool
    work: float
    due: Nanoseconds = 0
    result: Outcome | None = None

    def outcome(self) -> Outcome:
        if self.steps == 0:
            return Outcome(self.start, math.nan, self.buffers)
        return self.result or self.pool.compute(self)

    def shorten(self, steps: int) -> None:
        """Discard a result that was computed for more steps."""
        if steps != self.steps:
            self.steps, self.result = steps, None

    def request_result(self) -> None:
        self.pool.add(self)


@dataclass(slots=True)
class Pool:
    trainer: BatchTrainer
    lazily: bool
    """Compute only trainings whose result was requested: if nobody fetches an update in a send buffer,
    its training is never computed."""
    _pending: dict[Ticket, None] = field(default_factory=dict)

    def hand_in(self, ticket: Ticket) -> Ticket:
        if not self.lazily:
            self.add(ticket)
        return ticket

    def add(self, ticket: Ticket) -> None:
        """The result will be needed."""
        if ticket.result is None and ticket.steps:
            self._pending[ticket] = None

    def compute(self, ticket: Ticket) -> Outcome:
        """Others that wait are computed with it: those that end earliest, at most `trainer.together` in
        total."""
        self.add(ticket)
        tickets = list(self._pending)
        if len(tickets) > self.trainer.together:
            tickets = heapq.nsmallest(
                self.trainer.together, tickets, key=lambda one: (one is not ticket, one.due)
            )
        for one in tickets:
            del self._pending[one]
        for done, result in zip(tickets, self.trainer.run(tickets), strict=True):
            done.result = result
        assert ticket.result is not None  # noqa: S101  (it was among them)
        return ticket.result
