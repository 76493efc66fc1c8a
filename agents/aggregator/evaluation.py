"""The global model on the test set, off the aggregator's hot path: one thread, one model at a time."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.buffers import NONE, Buffers
from agents.flat import FlatModule
from agents.shards import Shard, inputs
from agents.tasks.interface import Task
from agents.vectors import Vector

_BATCH = 500
_BYTES = 4
"""Of a parameter, which is a float32."""
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
    result, or what went wrong, to `done`.

    With a folder `until_released`, models wait there, in a file without a name, until `release`. With
    `cpus` the thread runs on these.
    """

    def __init__(
        self,
        task: Task,
        test_set: Shard,
        done: Callable[[Future[Evaluation]], object],
        *,
        until_released: Path | None = None,
        cpus: Sequence[int] = (),
    ) -> None:
        self._flat = FlatModule(task.model())
        self._flat.module.eval()
        self._task = task
        self._x = inputs(torch.from_numpy(test_set.x), test_set.scale)
        self._y = torch.from_numpy(test_set.y)
        self._done = done
        self._thread = ThreadPoolExecutor(1, "evaluation", _begin, (cpus,))
        self._waiting: list[tuple[int, Buffers]] | None = None
        """Version and buffers of the models in the file, in order; None: they are evaluated at once."""
        if until_released is not None:
            self._waiting = []
            self._file = tempfile.TemporaryFile(dir=until_released)  # noqa: SIM115

    def submit(self, version: int, w: Vector, buffers: Buffers = NONE) -> None:
        """Evaluate a copy of `w`, shape (d,), with `buffers`."""
        if self._waiting is None:
            self._thread.submit(self.evaluate, version, w.copy(), buffers).add_done_callback(self._done)
        else:
            self._waiting.append((version, buffers))
            self._thread.submit(w.copy().tofile, self._file).add_done_callback(self._written)

    def release(self) -> None:
        """Evaluate what waits, and from now on at once."""
        waiting, self._waiting = self._waiting or [], None
        for place, (version, buffers) in enumerate(waiting):
            self._thread.submit(self._evaluate, version, place, buffers).add_done_callback(self._done)
        if waiting:
            self._thread.submit(self._file.close)

    def _written(self, writing: Future[Any]) -> None:
        if writing.exception() is not None:
            self._done(writing)

    def _evaluate(self, version: int, place: int, buffers: Buffers) -> Evaluation:
        """Evaluate the model at `place` of the file."""
        count = self._flat.w.numel()
        self._file.seek(place * count * _BYTES)
        return self.evaluate(version, np.fromfile(self._file, np.float32, count), buffers)

    def evaluate(self, version: int, w: Vector, buffers: Buffers = NONE) -> Evaluation:
        self._flat.load(w, buffers)
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


def _begin(cpus: Sequence[int]) -> None:
    """Set this thread's priority and its CPUs, with as many threads of torch."""
    os.nice(_NICE)
    if cpus:
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(len(cpus))
