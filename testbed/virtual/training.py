"""Local training of many clients at once: what `agents.client.training` does for one, to float32
rounding, on stacked models."""

from __future__ import annotations

import itertools
import math
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from agents.config import Local
from agents.shards import Shard
from agents.tasks.interface import Task
from agents.vectors import Vector
from testbed.virtual.objectives import AnyModule, Floats, Gradient, Indices, Objective, objective


@dataclass(frozen=True, slots=True)
class Job:
    """One local training."""

    start: Vector
    """Shape (d,), float32; not changed."""
    indices: Indices
    """The client's samples in the training set, shape (n,), n ≥ 1."""
    local: Local
    lr: float
    steps: int
    rng: np.random.Generator
    """Draws the mini-batches; no other job's."""
    gradient: bool = False
    """Take the gradient of one mini-batch at `start`, ℓ2 term included, and no step."""


@dataclass(frozen=True, slots=True)
class Result:
    end: Vector
    """Shape (d,), float32, its own memory: the end of the training, or the gradient."""
    loss: float
    """Mean over the steps, ℓ2 term included; NaN for no steps."""


class BatchTrainer:
    """Trains `task`'s model on clients' parts of `train`."""

    def __init__(self, task: Task, train: Shard) -> None:
        first = objective(task, train)
        self._l2 = np.float32(task.l2)
        self._at_once = first.at_once
        self._threads: ThreadPoolExecutor | None = None
        self._objectives: queue.SimpleQueue[Objective] = queue.SimpleQueue()
        self._objectives.put(first)
        if isinstance(first, AnyModule):
            # One client per thread: shared out within each operation, the work scales worse.
            threads = torch.get_num_threads()
            for _ in range(threads - 1):
                self._objectives.put(objective(task, train))
            self._threads = ThreadPoolExecutor(threads, "trainer", torch.set_num_threads, (1,))

    def run(self, jobs: Sequence[Job]) -> list[Result]:
        """The results of `jobs`, in their order."""
        steps = [job.steps for job in jobs]
        order = sorted(range(len(jobs)), key=steps.__getitem__, reverse=True)
        results: dict[int, Result] = {}
        for gradient in (False, True):
            places = [place for place in order if jobs[place].gradient is gradient]
            chunks = self._chunks([jobs[place] for place in places])
            run = map if self._threads is None else self._threads.map
            done = itertools.chain.from_iterable(run(self._chunk, chunks))
            results.update(zip(places, done, strict=True))
        return [results[place] for place in range(len(jobs))]

    def _chunks(self, jobs: Sequence[Job]) -> list[Sequence[Job]]:
        """Parts of `jobs` that are trained together: few enough for their memory, about equally many."""
        if not jobs:
            return []
        width = max(min(job.local.batch_size, len(job.indices)) for job in jobs)
        parts = -(-len(jobs) // self._at_once(width))
        size = -(-len(jobs) // parts)
        return [jobs[first : first + size] for first in range(0, len(jobs), size)]

    def _chunk(self, jobs: Sequence[Job]) -> list[Result]:
        objective = self._objectives.get()
        try:
            with np.errstate(all="ignore"):  # a client that diverges is the aggregator's to judge
                stack = _Stack(jobs, objective, self._l2)
                return stack.gradients() if jobs[0].gradient else stack.train()
        finally:
            self._objectives.put(objective)


class _Stack:
    """Jobs that make their steps together. Those with fewer steps come last, and drop out."""

    def __init__(self, jobs: Sequence[Job], objective: Objective, l2: np.float32) -> None:
        self._jobs = jobs
        self._objective = objective
        self._l2 = l2
        self._w: Floats = np.concatenate([job.start for job in jobs]).reshape(len(jobs), -1)
        self._gradient = np.empty_like(self._w)
        self._loss = np.zeros(len(jobs))

    def gradients(self) -> list[Result]:
        """Gradient and loss of each job's first mini-batch."""
        gradient = self._objective.on(*_batches(self._jobs, [1] * len(self._jobs)))
        self._differentiate(gradient, 0, len(self._jobs))
        self._gradient += self._l2 * self._w
        pairs = zip(self._gradient, self._loss.tolist(), strict=True)
        return [Result(end.copy(), loss) for end, loss in pairs]

    def train(self) -> list[Result]:
        """End and mean loss of each job's training.

        A step is w ← (1 − lr·(l2 + μ))·w − lr·g + lr·μ·start + ρ·(w − before), with `before` what w was
        a step ago: for a constant lr this is heavy-ball momentum ρ.
        """
        steps = [job.steps for job in self._jobs]
        gradient = self._objective.on(*_batches(self._jobs, steps))
        lr, momentum, proximal = self._knobs()
        shrink = 1 - lr * (self._l2 + proximal)
        pull = lr * proximal * self._w if proximal.any() else None
        before = self._w.copy() if momentum.any() else None
        n = len(steps)
        for step in range(steps[0]):
            while steps[n - 1] <= step:
                n -= 1
            self._differentiate(gradient, step, n)
            w, change = self._w[:n], self._gradient[:n]
            change *= lr[:n]
            if pull is not None:
                change -= pull[:n]
            if before is not None:
                change -= momentum[:n] * (w - before[:n])
                before[:n] = w
            w *= shrink[:n]
            w -= change
        triples = zip(self._jobs, self._w, self._loss.tolist(), strict=True)
        return [Result(_clipped(job, end), _mean(loss, job.steps)) for job, end, loss in triples]

    def _knobs(self) -> Floats:
        """Step size, momentum and FedProx's mu: each of shape (jobs, 1)."""
        values = [(job.lr, job.local.momentum, job.local.proximal) for job in self._jobs]
        return np.array(values, np.float32).T[:, :, None]

    def _differentiate(self, gradient: Gradient, step: int, n: int) -> None:
        """Gradient of the first n jobs, without the ℓ2 term; their loss, with it, is counted."""
        w, loss = self._w[:n], self._loss[:n]
        loss += gradient(step, w, self._gradient[:n])
        if self._l2:
            loss += 0.5 * self._l2 * np.vecdot(w, w)


def _batches(jobs: Sequence[Job], steps: Sequence[int]) -> tuple[Indices, Indices]:
    """Mini-batches as `agents.client.training.batches` draws them: the sample at (step, job, place),
    and the sizes of the mini-batches at (step, job). Places and steps beyond a job's own are 0."""
    widths = [min(job.local.batch_size, len(job.indices)) for job in jobs]
    rows = np.zeros((max(steps), len(jobs), max(widths)), np.int64)
    sizes = np.empty(rows.shape[:2], np.int64)
    sizes[:] = widths
    for k, (job, count, width) in enumerate(zip(jobs, steps, widths, strict=True)):
        samples = len(job.indices)
        full, rest = divmod(samples, width)
        for first in range(0, count, full + (rest > 0)):  # an epoch
            order = job.indices.take(job.rng.permutation(samples)[: (count - first) * width])
            last = min(first + full, count)
            rows[first:last, k, :width] = order[: full * width].reshape(-1, width)
            if rest and last < count:
                rows[last, k, :rest] = order[-rest:]
                sizes[last, k] = rest
    return rows, sizes


def _clipped(job: Job, end: Vector) -> Vector:
    """A copy of `end`, nearer to the job's start where its `clip` asks for it."""
    if job.local.clip is None:
        return end.copy()
    update = end - job.start
    norm = float(np.linalg.norm(update))
    if norm > job.local.clip:
        update *= np.float32(job.local.clip / norm)
    update += job.start
    return update


def _mean(total: float, steps: int) -> float:
    return total / steps if steps else math.nan
