"""Local training of many clients together, on stacked models, when the first result is needed."""

from __future__ import annotations

import enum
import functools
import heapq
import itertools
import math
import queue
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agents.client.core import Outcome
from agents.client.training import make_trainer
from agents.config import FROM_TASK, InitialModel, LocalTraining
from agents.models import flat
from agents.models.vectors import NONE, Buffers, Vector, norm
from agents.rules.client_half import NO_TERMS, Terms, Vectors
from agents.shards import Shard
from agents.tasks.interface import Task
from agents.timing.nanoseconds import Nanoseconds
from testbed.virtual.objectives import (
    AnyModule,
    Gradient,
    HostStackMemory,
    Indices,
    Objective,
    StackMemory,
    objective,
)

_JOBS_PER_THREAD = 4
"""Jobs to collect per thread, so that none waits long for the last job of another."""
_NAMED = 3
"""Maximum number of clients that an error names."""


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    start: Vector
    """Model to start from, shape (d,), float32; not changed."""
    indices: Indices
    """Indices in the training set, shape (n,), n ≥ 1."""
    local: LocalTraining
    lr: float
    """Used in place of the step size of `local`."""
    steps: int
    client: str = "a client"
    index: int = 0
    """Number in device order, from 0."""
    memory: Vectors = field(default_factory=dict)
    """Memory of the task's own `fit`."""
    rng: Callable[[], np.random.Generator]
    """For drawing the mini-batches. Each call returns a generator in the same state."""
    buffers: Buffers = NONE
    gradient: bool = False
    """Compute the gradient of one mini-batch at `start`, with the ℓ2 term, instead of training."""
    terms: Terms = NO_TERMS


class _JobKind(enum.Enum):
    STACKED = enum.auto()
    """Trainings, with others on stacked models."""
    GRADIENT = enum.auto()
    """Gradients, with others on stacked models."""
    SINGLE = enum.auto()
    """Alone, by the trainer that clients use outside virtual time."""


class BatchTrainer:
    """Trains models of `task` on clients' parts of `train`."""

    def __init__(
        self, task: Task, train: Shard, start: InitialModel = FROM_TASK, device: str = "cpu"
    ) -> None:
        self._draws = task.fits
        """Trainings draw from PyTorch's generator, which is the same for the whole process."""
        self.remark: str | None = None
        """Sentence for the user on how clients are trained; None if they are trained together."""
        self.together = sys.maxsize
        """Number of jobs that are worth collecting. If they are computed one after the other, more than
        the threads need are no faster, and some results may not be needed at the end of a run."""
        self._threads: ThreadPoolExecutor | None = None
        self._workers: queue.SimpleQueue[_TrainingWorker] = queue.SimpleQueue()

        def single() -> _Single:
            return _Single(task, train, start, device)

        if task.fits:
            self.together = 1
            self._workers.put(_TrainingWorker(None, HostStackMemory(), task.l2, single))
            self.remark = (
                "Clients are trained one after the other, by the task's own code. In virtual time each "
                "training takes as long as timing says, or one step, regardless of what that code does"
            )
            return
        first = objective(task, train, start)
        if device != "cpu" and isinstance(first, AnyModule) and not first.draws:
            self._use_gpu(task, train, start, device, first, single)
            return
        self._stack_size = first.stack_size
        self._workers.put(_TrainingWorker(first, HostStackMemory(), task.l2, single))
        if isinstance(first, AnyModule):
            self._draws = first.draws
            if self._draws or first.stack_size(1) == 1:
                self.together = 1
            self.remark = first.remark
            if first.refusal is not None:
                self.remark = (
                    "Clients are trained one after the other, because torch.func.vmap does not work "
                    f"with the model: {first.refusal}"
                )
        if isinstance(first, AnyModule) and not self._draws and device == "cpu":
            # One thread per client: dividing single operations among threads scales worse.
            threads = torch.get_num_threads()
            for _ in range(threads - 1):
                own = objective(task, train, start)
                self._workers.put(_TrainingWorker(own, HostStackMemory(), task.l2, single))
            self._threads = ThreadPoolExecutor(threads, "trainer", torch.set_num_threads, (1,))
            if self.together == 1 and threads > 1:
                self.together = _JOBS_PER_THREAD * threads

    def _use_gpu(
        self,
        task: Task,
        train: Shard,
        start: InitialModel,
        device: str,
        reference: AnyModule,
        single: Callable[[], _Single],
    ) -> None:
        """In stacks if their gradients are those of `reference`, else one client after the other."""
        from testbed.virtual.gpu_objective import GpuObjective

        stacked = GpuObjective(task, train, start, device)
        if (difference := stacked.difference(reference)) is not None:
            self._draws, self.together = True, 1
            self.remark = f"Clients are trained one after the other on the GPU, because {difference}"
        self._stack_size = stacked.stack_size
        self._workers.put(_TrainingWorker(stacked, stacked, task.l2, single))

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Return copies of the models, and losses with the ℓ2 term, in the order of `jobs`."""
        steps = [job.steps for job in jobs]
        order = sorted(range(len(jobs)), key=steps.__getitem__, reverse=True)
        each = map if self._threads is None else self._threads.map
        results: dict[int, Outcome] = {}
        for kind in _JobKind:
            places = [place for place in order if self._kind(jobs[place]) is kind]
            if not places:
                continue
            chosen, single = [jobs[place] for place in places], kind is _JobKind.SINGLE
            chunks = [[job] for job in chosen] if single else self._chunks(chosen)
            done = [*itertools.chain.from_iterable(each(partial(self._chunk, kind), chunks))]
            results.update(zip(places, done, strict=True))
        return [results[place] for place in range(len(jobs))]

    def _kind(self, job: Job) -> _JobKind:
        if self._draws or job.buffers.nbytes or not job.local.is_plain:
            return _JobKind.SINGLE
        return _JobKind.GRADIENT if job.gradient else _JobKind.STACKED

    def _chunks(self, jobs: Sequence[Job]) -> list[Sequence[Job]]:
        """Parts of about equal size, small enough for the memory."""
        if not jobs:
            return []
        width = max(map(_width, jobs))
        parts = -(-len(jobs) // self._stack_size(width))
        size = -(-len(jobs) // parts)
        return [jobs[first : first + size] for first in range(0, len(jobs), size)]

    def _chunk(self, kind: _JobKind, jobs: Sequence[Job]) -> list[Outcome]:
        worker = self._workers.get()
        try:
            with np.errstate(all="ignore"):  # the aggregator deals with clients that diverge
                return worker.run(kind, jobs)
        except Exception as error:
            error.add_note(f"in the training of {', '.join(job.client for job in jobs[:_NAMED])}")
            raise
        finally:
            self._workers.put(worker)


class _TrainingWorker:
    def __init__(
        self, objective: Objective | None, memory: StackMemory, l2: float, single: Callable[[], _Single]
    ) -> None:
        self._objective, self._memory = objective, memory
        self._single = functools.cache(single)
        self._l2 = float(np.float32(l2))

    def run(self, kind: _JobKind, jobs: Sequence[Job]) -> list[Outcome]:
        match kind:
            case _JobKind.GRADIENT:
                return self.gradients(jobs)
            case _JobKind.STACKED:
                return self.train(jobs)
            case _JobKind.SINGLE:
                return self._singles(jobs)

    def _singles(self, jobs: Sequence[Job]) -> list[Outcome]:
        return [self._single().train(job) for job in jobs]

    def gradients(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Gradient and loss of each job's first mini-batch."""
        assert self._objective is not None  # noqa: S101  (else all jobs are SINGLE)
        gradient = self._objective.gradient_on(*draw_batches(jobs, [1] * len(jobs)))
        w, out = self._memory.models([job.start for job in jobs])
        losses = self._differentiate(gradient, 0, w, out)
        if self._l2:
            out += self._l2 * w
        ends = self._memory.fetch(out)
        return [Outcome(end.copy(), loss) for end, loss in zip(ends, losses.tolist(), strict=True)]

    def train(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Model and mean loss of each job. Jobs are sorted by number of steps, largest first."""
        assert self._objective is not None  # noqa: S101  (else all jobs are SINGLE)
        steps = [job.steps for job in jobs]
        gradient = self._objective.gradient_on(*draw_batches(jobs, steps))
        w, g = self._memory.models([job.start for job in jobs])
        losses = self._memory.place(np.zeros(len(jobs)))
        descent = Descent(jobs, w, self._l2, self._memory.place)
        skips = any(self._skips(job) for job in jobs)
        n = len(jobs)
        for step in range(steps[0]):
            while steps[n - 1] <= step:
                n -= 1
            losses[:n] += self._differentiate(gradient, step, w[:n], g[:n])
            if skips and self._objective.partial:
                return self._singles(jobs)
            descent.step(w[:n], g[:n])
        triples = zip(jobs, self._memory.fetch(w), losses.tolist(), strict=True)
        return [
            Outcome(clipped(job, end), loss / job.steps if job.steps else math.nan)
            for job, end, loss in triples
        ]

    def _skips(self, job: Job) -> bool:
        """True if parameters on which the loss does not depend have to be skipped: weight decay or
        momentum would change them."""
        local = job.local
        every = self._l2 or local.proximal or job.terms  # then the loss depends on all parameters
        return not every and bool(local.weight_decay or local.momentum)

    def _differentiate(self, gradient: Gradient, step: int, w: Any, out: Any) -> Any:
        """Return the losses with the ℓ2 term; write the gradients without it to `out`."""
        losses = gradient(step, w, out)
        if self._l2:
            losses += 0.5 * self._l2 * self._memory.squares(w)
        return losses


class _Single:
    """Computes one job after the other, with the trainer that clients use outside virtual time."""

    def __init__(self, task: Task, train: Shard, start: InitialModel, device: str) -> None:
        self._train = train
        with flat.unchanged_generators():
            nothing = Shard(train.x[:0], train.y[:0], train.scale)
            self._trainer = make_trainer(task, nothing, LocalTraining(steps=1), start, device)

    def train(self, job: Job) -> Outcome:
        self._trainer.assign(
            self._train.subset(job.indices), replace(job.local, steps=job.steps, epochs=None)
        )
        self._trainer.set_client(job.client, job.index, job.memory)
        if job.gradient:
            result = self._trainer.gradient(job.start, job.rng(), job.buffers)
        else:
            result = self._trainer.train(
                *(job.start, job.rng(), job.lr), buffers=job.buffers, terms=job.terms
            )
        return Outcome(result.end, result.loss, result.buffers, result.memory)


class Descent:
    """SGD steps of many jobs: w ← (1 − lr·(l2 + μ + λ))·w − lr·g + lr·(μ·start − a) + ρ·(w − former).

    `former` is w before the previous step. With a constant lr, the last term is heavy-ball momentum ρ. μ
    is the proximal weight, λ is the weight decay, and a is the linear term of the rule.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        start: Any,
        l2: float,
        place: Callable[[NDArray[Any]], Any] = lambda array: array,
    ) -> None:
        """`start`: initial models, where `place` brings an array to, for instance on a GPU."""
        parameters = [
            (
                *(job.lr, job.local.momentum),
                *(job.local.proximal + job.terms.proximal, job.local.weight_decay),
            )
            for job in jobs
        ]
        rates, momentum, proximal, decay = np.array(parameters, np.float32).T[:, :, None]
        self._lr, self._momentum = place(rates), place(momentum)
        self._shrink = place(1 - rates * (l2 + proximal + decay))
        self._pull = place(rates * proximal) * start if proximal.any() else None
        if any(job.terms.linear is not None for job in jobs):
            if self._pull is None:
                self._pull = place(np.zeros(start.shape, np.float32))
            for row, lr, job in zip(self._pull, rates, jobs, strict=True):
                if job.terms.linear is not None:
                    row -= place(lr * job.terms.linear)
        self._former = None
        if momentum.any():
            self._former = place(np.zeros(start.shape, np.float32))
            self._former[:] = start

    def step(self, w: Any, g: Any) -> None:
        """A step of the first len(w) jobs. `g`: gradients without the ℓ2 and proximal terms;
        overwritten."""
        n = len(w)
        g *= self._lr[:n]
        if self._pull is not None:
            g -= self._pull[:n]
        if self._former is not None:
            former = self._former[:n]
            former -= w
            former *= self._momentum[:n]
            g += former
            former[:] = w
        w *= self._shrink[:n]
        w -= g


def draw_batches(jobs: Sequence[Job], steps: Sequence[int]) -> tuple[Indices, Indices]:
    """Like `agents.client.training.batches`. Return sample indices, shape (steps, jobs, b), 0 beyond the
    end of a job or mini-batch, and sizes of the mini-batches, shape (steps, jobs)."""
    rows = np.zeros((max(steps), len(jobs), max(map(_width, jobs))), np.int64)
    sizes = np.empty(rows.shape[:2], np.int64)
    for k, (job, count) in enumerate(zip(jobs, steps, strict=True)):
        samples, size = len(job.indices), job.local.batch_size
        batches, last = job.local.batches(samples)
        full = batches if last == size else batches - 1
        is_shuffled = job.local.first_batch(samples) < samples
        sizes[:, k] = size
        rng = job.rng() if is_shuffled else None  # to make one takes longer than a small training
        for first in range(0, count, batches):  # a pass
            drawn = np.arange(samples) if rng is None else rng.permutation(samples)
            order = job.indices.take(drawn[: (count - first + 1) * size])
            end = min(first + full, count)
            if end > first:
                rows[first:end, k, :size] = order[: (end - first) * size].reshape(-1, size)
            if full < batches and end < count:
                rows[end, k, :last] = order[full * size : full * size + last]
                sizes[end, k] = last
    return rows, sizes


def _width(job: Job) -> int:
    """Samples in the job's largest mini-batch."""
    return max(job.local.first_batch(len(job.indices)), job.local.batches(len(job.indices))[1])


def clipped(job: Job, end: Vector) -> Vector:
    """Copy of `end`, moved towards the initial model if the update exceeds `clip`."""
    if job.local.clip is None:
        return end.copy()
    update = end - job.start
    length = norm(update)
    if length > job.local.clip:
        update *= np.float32(job.local.clip / length)
    update += job.start
    return update


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
