"""Local trainings of the clients in flight, computed together when the first result is needed."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from agents.client.core import Outcome
from agents.timing.nanoseconds import Nanoseconds
from testbed.virtual.stacked_training import BatchTrainer, Job


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket(Job):
    """One training; implements `testbed.virtual.device.Training`."""

    pool: Pool
    due: Nanoseconds = 0
    result: Outcome | None = None

    def outcome(self) -> Outcome:
        if self.steps == 0:
            return Outcome(self.start, math.nan, self.buffers)
        return self.result or self.pool.compute(self)

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

    def compute(self, ticket: Ticket) -> Outcome:
        """The result of `ticket`, which is computed with what waits: with as much of it as makes that
        faster, and with what ends first."""
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
