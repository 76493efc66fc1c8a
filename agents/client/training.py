"""Local training: SGD on one shard, on flat vectors, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from agents.config import Local
from agents.flat import FlatModule
from agents.shards import Shard
from agents.tasks.interface import Task
from agents.vectors import Vector


@dataclass(frozen=True, slots=True)
class Result:
    vector: Vector
    """Shape (d,): end minus start (`delta`) or the end (`model`); valid until the next training."""
    steps: int
    loss: float
    """Mean over the steps, regularisation included."""


class Trainer:
    """Trains `task`'s model on `shard`, as `local` says."""

    def __init__(self, task: Task, shard: Shard, local: Local) -> None:
        self.flat = FlatModule(task.model())
        self._l2 = task.l2
        self._local = local
        self._x = torch.from_numpy(shard.x).to(torch.float32, copy=True).mul_(shard.scale)
        self._y = torch.from_numpy(shard.y)
        self._start = torch.zeros_like(self.flat.w)
        self._velocity = torch.zeros_like(self.flat.w)

    @property
    def steps(self) -> int:
        """Mini-batch steps of one training."""
        if self._local.steps is not None:
            return self._local.steps
        batches = -(-len(self._y) // self._local.batch_size)
        return (self._local.epochs or 1) * batches

    def warm_up(self) -> None:
        """Run one step, so that the first measured training does not pay for torch's lazy set-up."""
        self._step(torch.arange(min(len(self._y), self._local.batch_size)))

    def train(
        self,
        start: Vector,
        kind: str,
        rng: np.random.Generator,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Result | None:
        """Run SGD from `start`, shape (d,); None if `stopped` became true between two steps.

        Mini-batches come from a fresh permutation of the shard, drawn anew when it is used up.
        """
        np.copyto(self._start.numpy(), start)
        self.flat.load(start)
        self._velocity.zero_()
        loss = 0.0
        order = batches(len(self._y), self._local.batch_size, rng)
        for _ in range(self.steps):
            if stopped():
                return None
            loss += self._step(next(order))
        end = self.flat.w
        if self._local.clip is not None:
            self._clip(end, self._local.clip)
        vector = end.sub_(self._start) if kind == "delta" else end
        return Result(vector.numpy(), self.steps, loss / self.steps)

    def _step(self, batch: torch.Tensor) -> float:
        """One step: w ← w − lr·g, with FedProx's and the ℓ2 term in g and heavy-ball momentum."""
        flat, local = self.flat, self._local
        flat.gradient.zero_()
        logits = flat.module(self._x[batch])
        loss = torch.nn.functional.cross_entropy(logits, self._y[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        value = loss.item()
        with torch.no_grad():
            if self._l2:
                value += 0.5 * self._l2 * float(flat.w @ flat.w)
                flat.gradient.add_(flat.w, alpha=self._l2)
            if local.proximal:
                flat.gradient.add_(flat.w, alpha=local.proximal)
                flat.gradient.sub_(self._start, alpha=local.proximal)
            direction = flat.gradient
            if local.momentum:
                direction = self._velocity.mul_(local.momentum).add_(flat.gradient)
            flat.w.sub_(direction, alpha=local.lr)
        return value

    def _clip(self, end: torch.Tensor, bound: float) -> None:
        """Shorten the update so that ‖end − start‖ ≤ bound."""
        end.sub_(self._start)
        norm = float(end.norm())
        if norm > bound:
            end.mul_(bound / norm)
        end.add_(self._start)


def batches(samples: int, size: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Endless mini-batches of indices, shape (≤ size,); an epoch's last batch may be smaller."""
    while True:
        order = torch.from_numpy(rng.permutation(samples))
        yield from torch.split(order, size)
