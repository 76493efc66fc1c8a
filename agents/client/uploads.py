"""Updates that a client sends after training, in the form that its rule requires. Pure vector
arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from agents.client_side import ClientSide, Kind
from agents.config import Local
from agents.models.vectors import Vector
from agents.wire.payloads import ModelMessage


@dataclass(frozen=True, slots=True)
class Memory:
    """AREA's y_i: result of the last training that the aggregator has applied, and of one that it may
    have applied, each with the sequence number of its update. The next dispatch tells which of them
    holds.

    With secure aggregation a message may still be lost after it has arrived, with the sum that it is in.
    y_i is then the sum of what was sent and is not known to be lost."""

    applied: tuple[int, Vector] | None = None
    sent: tuple[int, Vector] | None = None
    waiting: Mapping[int, Vector] = field(default_factory=dict)
    """By the dispatch that it answered, what was sent and may still be lost."""

    @property
    def newest(self) -> int:
        """Highest sequence number in memory; 0 for none."""
        return max((known[0] for known in (self.applied, self.sent) if known), default=0)

    def acknowledged(
        self, sequence: int, waiting: Container[int] = (), lost: Iterable[int] = ()
    ) -> Memory:
        """Memory after the aggregator has acknowledged `sequence` as the last update that it took:
        empty where that update is unknown here, or is none of this membership (0). Of the messages that
        answered the dispatches in `lost` nothing came, and of those in `waiting` nothing may come."""
        for known in (self.sent, self.applied):
            if known is not None and known[0] == sequence:
                y = known[1]
                for gone in self.waiting.keys() & set(lost):
                    y = y - self.waiting[gone]
                kept = {number: one for number, one in self.waiting.items() if number in waiting}
                return Memory((sequence, y), None, kept)
        return Memory()


@dataclass(slots=True)
class History:
    """FAVANO: statistics of the local steps that the client had done whenever it was interrupted."""

    count: int = 0
    positive: int = 0
    steps: int = 0

    def divisor(self, steps: int, how: str) -> float:
        """α_i of an upload after `steps` local steps: P(E > 0)·E (`stochastic`) or E[E]."""
        self.count += 1
        self.positive += steps > 0
        self.steps += steps
        return self.positive * steps / self.count if how == "stochastic" else self.steps / self.count


@dataclass(frozen=True, slots=True)
class Form:
    """Content of an update."""

    kind: Kind
    vector: Callable[[], Vector]
    effective_steps: float = 1.0
    memory: Memory | None = None
    """Memory that the client must save before it sends the update."""


@dataclass(slots=True)
class Uploads:
    """Builder of one client's updates."""

    side: ClientSide
    local: Local
    memory: Memory = field(default_factory=Memory)
    history: History = field(default_factory=History)
    differences: bool = False
    """Whether more is to be done with a delta: compression, privacy."""
    as_sent: Callable[[int, Vector], Vector] | None = None
    """What a change is on its way, in the update with this number: rounded, for secure aggregation."""

    def acknowledge(self, message: ModelMessage) -> None:
        self.memory = self.memory.acknowledged(message.acknowledged, message.waiting, message.lost)

    def form(self, sequence: int, model: ModelMessage, steps: int, end: Callable[[], Vector]) -> Form:
        """The form of update `sequence`: `steps` local steps from `model` to `end()`, shape (d,)."""
        start = model.vector
        if self.side.kind == "residual":
            return self._residual(sequence, model, end())
        if self.side.debias is not None:
            divisor = self.history.divisor(steps, self.side.debias) or 1.0  # no step, no progress
            return Form("model", lambda: start + (end() - start) / np.float32(divisor))
        if self.side.kind != "delta":
            return Form(self.side.kind, end)
        if self.side.as_model and not self.differences and not self.local.fednova:
            return Form("model", end)
        if not self.local.fednova:
            return Form("delta", lambda: end() - start)
        lr = self.local.rate(model.version, model.lr)
        a = effective_steps(self.local, lr, steps)
        reported_steps = float(steps) if self.local.proximal else a
        return Form("delta", lambda: (end() - start) / np.float32(a or 1.0), reported_steps)

    def _residual(self, sequence: int, model: ModelMessage, end: Vector) -> Form:
        """m_i = x_i^M − y_i; without a y_i that the aggregator knows, x_i^M itself. What rounding keeps
        out of m_i, and what is cut off, is not in y_i either: the next message makes up for it."""
        known, y, waiting = self.memory.applied, end, self.memory.waiting
        if self.as_sent is not None:
            begun = model.vector if known is None else known[1]
            sent = self.as_sent(sequence, end - begun)
            y = (begun + sent).astype(end.dtype)
            waiting = {**waiting, model.dispatch: sent}
        self.memory = Memory(known, (sequence, y), waiting)
        if known is None:
            return Form("model", lambda: end, memory=self.memory)
        return Form("residual", lambda: end - known[1], memory=self.memory)


def effective_steps(local: Local, lr: float, steps: int) -> float:
    """FedNova's a_i (Wang et al. 2020): by how much `steps` steps multiply one step's progress.

    Momentum ρ: c ← ρc + 1, a ← a + c. Proximal term μ: a ← (1 − ημ)a + 1; with both, momentum first.
    """
    a = c = 0.0
    shrink = 1 - lr * local.proximal
    for _ in range(steps):
        if local.momentum:
            c = local.momentum * c + 1
            a += c
        if local.proximal:
            a = shrink * a + 1
        elif not local.momentum:
            a += 1
    return a
