from __future__ import annotations

import functools
import os
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar

import numpy as np
import pytest
import torch

from agents.aggregator.evaluation import Evaluation, Evaluator
from agents.models.vectors import NONE, Buffers, Vector
from agents.shards import Parts, Shard
from agents.tasks.interface import Task
from agents.tasks.quadratic import Quadratic


@dataclass(frozen=True)
class Regularised(Quadratic):
    """Every second prediction is right."""

    l2: float = 0.5

    def correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        return torch.arange(len(outputs)) % 2 == 0


def test_the_loss_is_the_mean_over_all_batches_with_the_penalty() -> None:
    """At w = 2 half of the 1,200 samples are at 0 with ½·2² = 2 each, and half at 3 with ½·1² = ½ each;
    the penalty is ½·½·2² = 1."""
    x = np.repeat(np.array([[0], [30]], np.uint8), 600, axis=0)
    evaluator = Evaluator(
        Regularised(((0.0,),)), Shard(x, np.zeros(1200, np.int64), scale=0.1), lambda _: None
    )
    found = evaluator.evaluate(3, np.array([2.0], np.float32))
    assert found.version == 3
    assert found.loss == pytest.approx(1.25 + 1.0)
    assert found.accuracy == 0.5


def test_loss_of_nan_is_reported_as_infinite() -> None:
    task = Quadratic(((1.0,), (3.0,)))
    evaluator = Evaluator(task, task.shards()[0], lambda _: None)
    found = evaluator.evaluate(1, np.array([np.nan], np.float32))
    assert found.loss == np.inf
    assert np.isnan(found.accuracy)  # a quadratic has none


@dataclass(frozen=True)
class Tokens(Task):
    """Token k of three has the output that is the k-th row."""

    dataset: ClassVar[None] = None

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Embedding(3, 3), torch.nn.Flatten())


def test_tokens_are_passed_to_the_model_as_integers() -> None:
    test_set = Shard(np.array([[1], [2]], np.int8), np.array([1, 0]))
    evaluator = Evaluator(Tokens(), test_set, lambda _: None)
    assert evaluator.evaluate(1, np.eye(3, dtype=np.float32).reshape(-1)).accuracy == 0.5


@dataclass(frozen=True)
class Weighing(Quadratic):
    """A task like Flower's: each sample has the loss and accuracy ½, times its share x."""

    fits: ClassVar[bool] = True

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 0.5 * outputs[:, 0] / outputs[:, 0].mean()

    def correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        return self.loss(outputs, y)


def test_sample_weights_do_not_weigh_devices_against_each_other() -> None:
    both = Shard(np.array([[1.0], [7.0]], np.float32), np.zeros(2, np.int64))
    parts = Parts(device_set=both, device_samples={"a": 1, "b": 1})
    evaluator = Evaluator(Weighing(((0.0,),)), both, lambda _: None, parts=parts)
    found = evaluator.evaluate(1, np.zeros(1, np.float32))
    assert [found.accuracy, *(part.accuracy for part in found.parts)] == [0.5] * 3


def test_evaluations_run_at_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that applies updates keeps its own priority: niceness belongs to a thread."""
    found: list[int] = []
    task = Quadratic(((1.0,), (3.0,)))
    niceness = functools.partial(os.getpriority, os.PRIO_PROCESS, 0)
    before = niceness()
    monkeypatch.setattr(Quadratic, "correct", lambda *_: found.append(niceness()))
    done: Future[Future[Evaluation]] = Future()
    Evaluator(task, task.shards()[0], done.set_result).submit(7, np.zeros(1, np.float32))
    evaluation = done.result(timeout=120).result()
    assert (evaluation.version, evaluation.loss) == (7, 0.5)
    assert found == [19]
    assert niceness() == before


def test_kept_models_are_evaluated_after_the_release_in_order() -> None:
    """Models have two parameters each; a model submitted after the release is evaluated then."""
    task = Quadratic(((0.0, 0.0), (0.0, 0.0)))
    done: SimpleQueue[Future[Evaluation]] = SimpleQueue()
    models = {1: (1.0, 0.0), 3: (2.0, 0.0), 5: (0.0, 4.0)}
    read: list[int] = []

    def kept(version: int) -> tuple[Vector, Buffers]:
        read.append(version)
        return np.array(models[version], np.float32), NONE

    evaluator = Evaluator(task, task.shards()[0], done.put, kept=kept, until_released=True)
    evaluator.submit_kept(1)  # of a run that goes on
    w = np.array([2.0, 0.0], np.float32)
    evaluator.submit(3, w)
    w[:] = 0.0, 4.0
    evaluator.submit(5, w)
    w[:] = 0.0, 0.0
    assert (read, done.empty()) == ([], True)
    evaluator.release()
    evaluator.submit(9, w)
    found = [done.get(timeout=120).result() for _ in range(4)]
    losses = [(each.version, each.loss) for each in found]
    assert losses == [(1, 0.5), (3, 2.0), (5, 8.0), (9, 0.0)]
    assert read == [1, 3, 5]


def test_unreadable_kept_model_is_an_error(tmp_path: Path) -> None:
    task = Quadratic(((0.0,),))
    done: SimpleQueue[Future[Evaluation]] = SimpleQueue()

    def gone(version: int) -> tuple[Vector, Buffers]:
        raise FileNotFoundError(tmp_path / f"{version}")

    Evaluator(task, task.shards()[0], done.put, kept=gone).submit_kept(1)
    with pytest.raises(FileNotFoundError):
        done.get(timeout=120).result()


def test_evaluations_can_use_reserved_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use as many torch threads as CPUs; the thread that applies updates keeps its own CPUs."""
    mine, threads = os.sched_getaffinity(0), torch.get_num_threads()
    found: list[tuple[set[int], int]] = []
    task = Quadratic(((1.0,), (3.0,)))
    monkeypatch.setattr(
        Quadratic, "correct", lambda *_: found.append((os.sched_getaffinity(0), torch.get_num_threads()))
    )
    done: Future[Future[Evaluation]] = Future()
    evaluator = Evaluator(task, task.shards()[0], done.set_result, cpus=[max(mine)])
    evaluator.submit(7, np.zeros(1, np.float32))
    assert done.result(timeout=120).result().loss == 0.5
    assert found == [({max(mine)}, 1)]
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (mine, threads)
