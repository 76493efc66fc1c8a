"""Evaluation of the global model on the test set, one model after the other, in a separate thread."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from agents.aggregator.inputs import EvaluationDone, PartEvaluated
from agents.config import FROM_TASK, InitialModel
from agents.disturbances import Watchdog
from agents.models import flat
from agents.models.flat import FlatModule, build
from agents.models.vectors import NONE, Buffers, Vector
from agents.shards import NO_PARTS, Part, Parts, Shard
from agents.tasks.interface import Task, calls_correct
from agents.timing.nanoseconds import Nanoseconds

_BATCH = 500
_TRIED = 2
"""Samples that show whether a model draws random numbers in an evaluation."""
_NICE = 19
"""Niceness of the evaluating thread. On Linux each thread has its own niceness."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    version: int
    loss: float
    """Mean loss on the test set, including the regularisation."""
    accuracy: float
    """Share of correct predictions, from 0 to 1; NaN if the task has no accuracy."""
    parts: Sequence[Part] = ()
    """Results on the requested parts of the data; empty if no parts were requested."""

    def inputs(self, at: Nanoseconds) -> list[PartEvaluated | EvaluationDone]:
        parts = (
            PartEvaluated(at, self.version, one.part, one.name, one.samples, one.loss, one.accuracy)
            for one in self.parts
        )
        return [*parts, EvaluationDone(at, self.version, self.loss, self.accuracy)]


class Evaluator:
    """Evaluates models in its own thread, with low priority. `done` gets a future for each result or
    error.

    `kept`: loads a version's model from its file, if models are kept. `until_released`: evaluate only
    after `release`. `cpus`: of the thread; empty for those of the process.
    """

    def __init__(
        self,
        task: Task,
        test_set: Shard,
        done: Callable[[Future[Evaluation]], object],
        *,
        kept: Callable[[int], tuple[Vector, Buffers]] | None = None,
        until_released: bool = False,
        cpus: Sequence[int] = (),
        start: InitialModel = FROM_TASK,
        parts: Parts = NO_PARTS,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._flat = FlatModule(build(task, start), trained=False)
        self._flat.module.eval()
        self._task = task
        self._test_set = test_set.tensors()
        self.draws = task.fits or self._draws_random_numbers()
        """Evaluations may draw from the process's global random generators, which nothing else may use
        meanwhile."""
        self._parts = parts
        self._device_set = None if parts.device_set is None else parts.device_set.tensors()
        self._done, self._watchdog = done, watchdog
        self._thread = ThreadPoolExecutor(1, "evaluation", _begin, (cpus,))
        self._kept = kept
        self._waiting: list[int] | None = [] if until_released else None
        """Versions that wait for `release`, in order; None if models are evaluated at once."""

    def submit(self, version: int, w: Vector, buffers: Buffers = NONE) -> None:
        """Evaluate a copy of `w`, shape (d,). Before `release`, `w` is not used: the model is later
        loaded from its file."""
        if self._waiting is None:
            self._thread.submit(self.evaluate, version, w.copy(), buffers).add_done_callback(self._done)
        else:
            self._waiting.append(version)

    def submit_kept(self, version: int) -> None:
        """Evaluate the model of `version` from its file, after `release`."""
        if self._waiting is None:
            self._thread.submit(self._evaluate_kept, version).add_done_callback(self._done)
        else:
            self._waiting.append(version)

    def release(self) -> None:
        """Evaluate the models that wait. Later ones are evaluated when they are submitted."""
        waiting, self._waiting = self._waiting or [], None
        for version in waiting:
            self.submit_kept(version)

    def _evaluate_kept(self, version: int) -> Evaluation:
        if self._kept is None:
            raise RuntimeError("no models are kept")
        return self.evaluate(version, *self._kept(version))

    def _draws_random_numbers(self) -> bool:
        x, y = (part[:_TRIED] for part in self._test_set)
        with flat.unchanged_generators(), torch.no_grad():
            before = flat.generator_states()
            with suppress(Exception):  # the first evaluation raises it
                self._task.loss(self._flat.module(x), y)
            return flat.generator_states() != before

    def evaluate(self, version: int, w: Vector, buffers: Buffers = NONE) -> Evaluation:
        if self.draws:
            flat.seed_generators(
                version
            )  # so that its result does not depend on what was evaluated before
        if self._watchdog is not None:
            self._watchdog.begin()
        try:
            return self._evaluate(version, w, buffers)
        except Exception as error:
            error.add_note(f"in the evaluation of version {version}")
            raise
        finally:
            if self._watchdog is not None:
                self._watchdog.end()

    def _evaluate(self, version: int, w: Vector, buffers: Buffers) -> Evaluation:
        self._flat.load(w, buffers)
        with torch.no_grad():
            penalty = 0.5 * self._task.l2 * float(self._flat.w @ self._flat.w)
            labels = self._test_set[1].numpy()
            figures = self._on(self._test_set, len(labels) if self._task.needs_whole_set else _BATCH)
            parts: list[Part] = []
            if self._parts.classes and labels.ndim == 1:
                for label in np.unique(labels).tolist():
                    own = labels == label
                    parts.append(_part("class", str(label), [each[own] for each in figures], penalty))
            if self._device_set is not None:
                counts = list(self._parts.device_samples.values())
                # User code with its own fit (Flower) may treat a batch as a whole: one batch per device.
                of_all = self._on(self._device_set, counts if self._task.fits else _BATCH)
                by_device = (np.split(each, np.cumsum(counts)[:-1]) for each in of_all)
                for name, *own in zip(self._parts.device_samples, *by_device, strict=True):
                    parts.append(_part("device", name, own, penalty))
        whole = _part("", "", figures, penalty)
        return Evaluation(version, whole.loss, whole.accuracy, tuple(parts))

    def _on(self, samples: _Samples, batches: int | list[int] = _BATCH) -> list[Vector]:
        """Loss of each sample, its weight in the mean, and whether the prediction is correct (NaN if the
        task has no accuracy). `batches`: one size, or that of each batch."""
        losses: list[Vector] = []
        weights: list[Vector] = []
        right: list[Vector] = []
        for x, y in zip(*(torch.split(each, batches) for each in samples), strict=True):
            outputs = self._flat.module(x)
            losses.append(self._task.loss(outputs, y).double().numpy())
            own = self._task.weights(y)
            weights.append(np.ones(len(y)) if own is None else own.double().numpy())
            correct = self._task.correct(outputs, y) if calls_correct(self._task) else None
            right.append(np.full(len(y), math.nan) if correct is None else correct.double().numpy())
        return [np.concatenate(each) for each in (losses, weights, right)]


_Samples = tuple[torch.Tensor, torch.Tensor]


def _part(part: str, name: str, figures: Sequence[Vector], penalty: float) -> Part:
    losses, weights, right = figures
    loss = float(np.average(losses, weights=weights if weights.any() else None)) + penalty
    return Part(part, name, len(losses), loss if math.isfinite(loss) else math.inf, float(right.mean()))


def _begin(cpus: Sequence[int]) -> None:
    """Low priority. If `cpus` is not empty, use these alone, and one torch thread per CPU."""
    os.nice(_NICE)
    if cpus:
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(len(cpus))
