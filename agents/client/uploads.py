"""Updates that a client sends after training, in the form that its rule requires. Pure vector
arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from agents.config import Local
from agents.rules.interface import ClientSide, Kind
from agents.vectors import Vector
from agents.wire import ModelMessage


@dataclass(frozen=True, slots=True)
class Memory:
    """AREA's y_i: result of the last training that the aggregator has applied, and of one that it may
    have applied, each with the sequence number of its update. The next dispatch tells which of them
    holds."""

    applied: tuple[int, Vector] | None = None
    sent: tuple[int, Vector] | None = None

    @property
    def newest(self) -> int:
        """Highest sequence number in memory; 0 for none."""
        return max((known[0] for known in (self.applied, self.sent) if known), default=0)

    def acknowledged(self, sequence: int) -> Memory:
        """Memory after the aggregator has acknowledged `sequence` as the last update that it applied:
        empty where that update is unknown here, or is none of this membership (0)."""
        for known in (self.sent, self.applied):
            if known is not None and known[0] == sequence:
                return Memory(known)
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

    def acknowledge(self, sequence: int) -> None:
        self.memory = self.memory.acknowledged(sequence)

    def form(self, sequence: int, model: ModelMessage, steps: int, end: Callable[[], Vector]) -> Form:
        """The form of update `sequence`: `steps` local steps from `model` to `end()`, shape (d,)."""
        start = model.vector
        if self.side.kind == "residual":
            return self._residual(sequence, end())
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

    def _residual(self, sequence: int, end: Vector) -> Form:
        """m_i = x_i^M − y_i; without a y_i that the aggregator knows, x_i^M itself."""
        known = self.memory.applied
        self.memory = Memory(known, (sequence, end))
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
