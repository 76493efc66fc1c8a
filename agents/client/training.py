"""Local training: SGD on one shard, on flat vectors, in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from agents.buffers import NONE, Buffers
from agents.config import Local
from agents.flat import FlatModule, buffers_of
from agents.shards import Shard, inputs
from agents.tasks.interface import Task
from agents.vectors import Vector


@dataclass(frozen=True, slots=True)
class Result:
    end: Vector
    """Shape (d,): the trained parameters; the gradient, if that was requested."""
    steps: int
    """Done before it was cut short."""
    loss: float
    """Mean over the steps, regularisation included; NaN without any."""
    buffers: Buffers = NONE
    """As the training left them."""


class Trainer:
    """Trainer of `task`'s model on `shard`, with the settings `local`. `flat` is that model where it has
    been built before."""

    def __init__(self, task: Task, shard: Shard, local: Local, flat: FlatModule | None = None) -> None:
        self.flat = flat or FlatModule(task.model())
        self._task = task
        self._local = local
        self._x = inputs(torch.from_numpy(shard.x), shard.scale)
        self._y = torch.from_numpy(shard.y)
        self._start = torch.zeros_like(self.flat.w)
        self._velocity = torch.zeros_like(self.flat.w)

    def warm_up(self) -> None:
        """Run one step, so that the first measured training does not pay for torch's lazy set-up."""
        self._gradient(torch.arange(min(len(self._y), self._local.batch_size)))
        self._descend(self._local.lr)

    def train(
        self,
        start: Vector,
        rng: np.random.Generator,
        lr: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
        *,
        buffers: Buffers = NONE,
    ) -> Result:
        """Run SGD from `start`, shape (d,), and `buffers` to its end or until `stopped` becomes true
        after a step.

        Mini-batches come from a fresh permutation of the shard, drawn anew when it is used up. `lr` is
        the step size, the local one by default.
        """
        lr = self._local.lr if lr is None else lr
        self._load(start, buffers)
        loss, steps = 0.0, 0
        order = batches(len(self._y), self._local.batch_size, rng)
        for _ in range(self._local.count(len(self._y))):
            if stopped():
                break
            loss += self._gradient(next(order))
            self._descend(lr)
            steps += 1
        end = self.flat.w
        if self._local.clip is not None:
            self._clip(end, self._local.clip)
        mean = loss / steps if steps else math.nan
        return Result(end.numpy().copy(), steps, mean, buffers_of(self.flat.module))

    def gradient(self, start: Vector, rng: np.random.Generator, buffers: Buffers = NONE) -> Result:
        """The gradient of one mini-batch at `start`, shape (d,), with `buffers`."""
        self._load(start, buffers)
        loss = self._gradient(next(batches(len(self._y), self._local.batch_size, rng)))
        return Result(self.flat.gradient.numpy().copy(), 1, loss, buffers_of(self.flat.module))

    def _load(self, start: Vector, buffers: Buffers) -> None:
        np.copyto(self._start.numpy(), start)
        self.flat.load(start, buffers)
        self._velocity.zero_()

    def _gradient(self, batch: torch.Tensor) -> float:
        """The local objective on `batch`, its gradient in `flat`: FedProx's and the ℓ2 term included."""
        flat, local, l2 = self.flat, self._local, self._task.l2
        flat.gradient.zero_()
        loss = self._task.loss(flat.module(self._x[batch]), self._y[batch]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        value = loss.item()
        with torch.no_grad():
            if l2:
                value += 0.5 * l2 * float(flat.w @ flat.w)
                flat.gradient.add_(flat.w, alpha=l2)
            if local.proximal:
                flat.gradient.add_(flat.w, alpha=local.proximal)
                flat.gradient.sub_(self._start, alpha=local.proximal)
        return value

    def _descend(self, lr: float) -> None:
        """One step: w ← w − lr·g, with heavy-ball momentum."""
        flat = self.flat
        with torch.no_grad():
            direction = flat.gradient
            if self._local.momentum:
                direction = self._velocity.mul_(self._local.momentum).add_(flat.gradient)
            flat.w.sub_(direction, alpha=lr)

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
        # A full batch is taken as it is: plain gradient descent, to the bit.
        order = torch.from_numpy(rng.permutation(samples) if size < samples else np.arange(samples))
        yield from torch.split(order, size)
