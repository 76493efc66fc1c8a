"""The global model on the test set, off the aggregator's hot path: one thread, one model at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from agents.flat import FlatModule
from agents.shards import Shard
from agents.tasks.interface import Task
from agents.vectors import Vector

_BATCH = 500
_NICE = 19
"""In Linux niceness is a thread's own."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    version: int
    loss: float
    """Mean over the test set, regularisation included."""
    accuracy: float
    """Share of correct predictions, 0 to 1; NaN for a task that has none."""


class Evaluator:
    """Evaluates models in its own thread, which gives way to updates and to the broker, and hands each
    result, or what went wrong, to `done`."""

    def __init__(
        self, task: Task, test_set: Shard, done: Callable[[Future[Evaluation]], object]
    ) -> None:
        self._flat = FlatModule(task.model())
        self._flat.module.eval()
        self._task = task
        self._x = torch.from_numpy(test_set.x).to(torch.float32, copy=True).mul_(test_set.scale)
        self._y = torch.from_numpy(test_set.y)
        self._done = done
        self._thread = ThreadPoolExecutor(1, "evaluation", os.nice, (_NICE,))

    def submit(self, version: int, w: Vector) -> None:
        """Evaluate a copy of `w`, shape (d,)."""
        self._thread.submit(self.evaluate, version, w.copy()).add_done_callback(self._done)

    def evaluate(self, version: int, w: Vector) -> Evaluation:
        self._flat.load(w)
        loss, right = 0.0, 0.0
        with torch.no_grad():
            for x, y in zip(torch.split(self._x, _BATCH), torch.split(self._y, _BATCH), strict=True):
                outputs = self._flat.module(x)
                loss += float(self._task.loss(outputs, y).sum())
                correct = self._task.correct(outputs, y)
                right += math.nan if correct is None else float(correct.sum())
            penalty = 0.5 * self._task.l2 * float(self._flat.w @ self._flat.w)
        loss = loss / len(self._y) + penalty
        return Evaluation(version, loss if math.isfinite(loss) else math.inf, right / len(self._y))
