"""Batched local training against the client's own trainer, and against arithmetic by hand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import nn

from agents.client.core import Outcome
from agents.client.training import Trainer, batches
from agents.config import InitialModel, LocalTraining, Schedule
from agents.models.flat import initial
from agents.shards import Shard
from agents.tasks.cnn import Cifar10Cnn, MnistCnn
from agents.tasks.interface import Task
from agents.tasks.logreg import DigitsLogreg, MnistLogreg
from agents.tasks.quadratic import Quadratic
from testbed.virtual.objectives import AnyModule
from testbed.virtual.stacked_training import BatchTrainer, Job


@dataclass(frozen=True)
class Tiny(Task):
    """4 inputs, 3 hidden units, 2 classes: 23 parameters."""

    dataset: ClassVar[str] = "none"
    l2: float = 0.1

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


@dataclass(frozen=True)
class Regression(Task):
    """The module of a logistic regression with another loss."""

    dataset: ClassVar[str] = "none"
    l2: float = 0.1

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs.sum(1) - y).square()


CENTERS = ((0.0, 2.0), (1.0, -1.0), (3.0, 0.5))
IMAGES = {"digits": (8, 8), "mnist": (28, 28), "cifar": (3, 32, 32)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "proximal": {"proximal": 0.7},
    "clip": {"clip": 0.05},
    "decay": {"weight_decay": 0.3, "momentum": 0.5},
    "merge": {"last_batch": "merge", "proximal": 0.7},
    "all": {"momentum": 0.5, "proximal": 0.7, "clip": 0.3},
}


def _images(shape: tuple[int, ...], samples: int = 60, classes: int = 10) -> Shard:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (samples, *shape), np.uint8)
    return Shard(pixels, rng.integers(0, classes, samples), scale=1 / 255)


def _points(size: int, samples: int = 60) -> Shard:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, size)).astype(np.float32)
    return Shard(x, rng.integers(0, 2, samples), scale=0.5)


TASKS: dict[str, tuple[Task, Shard]] = {
    "logistic": (DigitsLogreg(l2=0.05), _images(IMAGES["digits"])),
    "no bias": (DigitsLogreg(l2=0.0, bias=False), _images(IMAGES["digits"])),
    "float inputs": (DigitsLogreg(), _points(64)),
    "quadratic": (Quadratic(CENTERS), _points(2)),
    "module": (Tiny(), _points(4)),
    "own loss": (Regression(), _points(4)),
}
LARGE: dict[str, tuple[Task, Shard]] = {
    "mnist-logreg": (MnistLogreg(), _images(IMAGES["mnist"])),
    "mnist-cnn": (MnistCnn(), _images(IMAGES["mnist"])),
    "cifar10-cnn": (Cifar10Cnn(), _images(IMAGES["cifar"])),
}


def _jobs(task: Task, train: Shard, options: dict[str, Any], *, gradient: bool = False) -> list[Job]:
    """Clients with shards, batch sizes, step sizes, steps and start models of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        w = initial(task.model())
    rng = np.random.default_rng(2)
    jobs = []
    for seed, (samples, batch, steps, lr) in enumerate(RAGGED):
        start = w + rng.normal(0, 0.05, w.size).astype(np.float32)
        indices = rng.choice(len(train), samples, replace=False)
        local = LocalTraining(steps=steps, batch_size=batch, lr=lr, **options)
        jobs.append(
            Job(
                start=start,
                indices=indices,
                local=local,
                lr=lr,
                steps=steps,
                rng=functools.partial(np.random.default_rng, seed),
                gradient=gradient,
            )
        )
    return jobs


RAGGED = [(17, 4, 9, 0.1), (5, 8, 3, 0.3), (1, 4, 2, 0.2), (40, 32, 1, 0.1), (12, 4, 9, 0.05)]
"""Samples, batch size, steps, lr."""


def _trainers(task: Task, train: Shard, jobs: Sequence[Job]) -> list[Trainer]:
    """The clients' own."""
    shards = [Shard(train.x[job.indices], train.y[job.indices], train.scale) for job in jobs]
    return [Trainer(task, shard, job.local) for shard, job in zip(shards, jobs, strict=True)]


CLOSE, EQUAL = (1e-4, 1e-6), (0.0, 0.0)
"""Relative and absolute difference that a result may have."""


def _assert_like_the_clients(
    task: Task,
    train: Shard,
    jobs: Sequence[Job],
    results: Sequence[Outcome],
    within: tuple[float, float],
) -> None:
    """Compare with the clients' own trainers, whose seeds are 0 to 4 again and again."""
    for k, (own, job, result) in enumerate(
        zip(_trainers(task, train, jobs), jobs, results, strict=True)
    ):
        rng = np.random.default_rng(k % len(RAGGED))
        expected = own.gradient(job.start, rng) if job.gradient else own.train(job.start, rng, job.lr)
        np.testing.assert_allclose(result.end, expected.end, *within)
        assert result.loss == pytest.approx(expected.loss, rel=within[0], abs=0)


def _assert_trained_alike(task: Task, train: Shard, options: dict[str, Any]) -> None:
    jobs = _jobs(task, train, options)
    _assert_like_the_clients(task, train, jobs, BatchTrainer(task, train).run(jobs), CLOSE)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("task", TASKS)
def test_stacked_training_equals_the_clients(task: str, options: dict[str, Any]) -> None:
    _assert_trained_alike(*TASKS[task], options)


SINGLE: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1, "clip": 0.05},
    "clipped gradient": {"clip_gradient": 0.01, "momentum": 0.5},
    "schedule": {"lr_by_step": Schedule(over=4), "momentum": 0.5},
    "bfloat16": {"precision": "bfloat16"},
}
"""Settings that no stack of models is trained with."""


@pytest.mark.parametrize("options", SINGLE.values(), ids=SINGLE)
@pytest.mark.parametrize("task", ["logistic", "quadratic", "module"])
def test_other_optimisers_equal_the_client_bit_by_bit(task: str, options: dict[str, Any]) -> None:
    """They run beside jobs of plain SGD; after one job the trainer continues with another."""
    jobs = _jobs(*TASKS[task], options)
    plain = _jobs(*TASKS[task], {})[0]
    *results, beside = BatchTrainer(*TASKS[task]).run([*jobs, plain])
    _assert_like_the_clients(*TASKS[task], jobs, results, EQUAL)
    _assert_like_the_clients(*TASKS[task], [plain], [beside], CLOSE)


def test_clipped_gradient_equals_the_client_bit_by_bit() -> None:
    task, train = TASKS["module"]
    jobs = _jobs(task, train, SINGLE["clipped gradient"], gradient=True)
    _assert_like_the_clients(task, train, jobs, BatchTrainer(task, train).run(jobs), EQUAL)


def test_interrupted_training_does_only_its_steps() -> None:
    task, train = TASKS["module"]
    job = _jobs(task, train, SINGLE["schedule"])[0]
    job.steps = 4
    (result,) = BatchTrainer(task, train).run([job])
    (trainer,) = _trainers(task, train, [job])
    asked = iter([False] * 4 + [True])
    expected = trainer.train(job.start, np.random.default_rng(0), job.lr, lambda: next(asked))
    assert expected.steps == 4
    np.testing.assert_array_equal(result.end, expected.end)


def test_stacked_models_leave_out_frozen_parameters() -> None:
    task, train = TASKS["logistic"]
    start = InitialModel(frozen=("1.weight",))
    job = dataclasses.replace(_jobs(task, train, {})[0], start=np.zeros(10, np.float32))
    (result,) = BatchTrainer(task, train, start).run([job])
    shard = Shard(train.x[job.indices], train.y[job.indices], train.scale)
    expected = Trainer(task, shard, job.local, start).train(job.start, np.random.default_rng(0), job.lr)
    np.testing.assert_allclose(result.end, expected.end, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("task", LARGE)
def test_training_of_a_large_model_equals_the_clients(task: str) -> None:
    _assert_trained_alike(*LARGE[task], OPTIONS["all"])


@pytest.mark.parametrize("task", TASKS)
def test_gradient_equals_the_clients(task: str) -> None:
    jobs = _jobs(*TASKS[task], OPTIONS["all"], gradient=True)
    _assert_like_the_clients(*TASKS[task], jobs, BatchTrainer(*TASKS[task]).run(jobs), CLOSE)


def _quadratic(client: int, steps: int, lr: float = 0.5, *, gradient: bool = False) -> Job:
    local = LocalTraining(steps=steps, lr=lr)
    return Job(
        start=np.zeros(2, np.float32),
        indices=np.array([client]),
        local=local,
        lr=lr,
        steps=steps,
        rng=lambda: np.random.default_rng(0),
        gradient=gradient,
    )


def _centers() -> BatchTrainer:
    train = Shard(np.array(CENTERS, np.float32), np.zeros(3, np.int64))
    return BatchTrainer(Quadratic(CENTERS), train)


def test_two_steps_to_a_center_by_hand() -> None:
    """From 0 with lr ½: half way, then half of the rest; ½‖w − c‖² is 2 and then ½ of (0, 1)."""
    (result,) = _centers().run([_quadratic(0, steps=2)])
    assert result.end.tolist() == [0.0, 1.5]
    assert result.loss == pytest.approx((2 + 0.5) / 2)


@pytest.mark.parametrize("last_batch", ["keep", "drop", "merge"])
def test_stacked_training_uses_the_clients_mini_batches(
    last_batch: Literal["keep", "drop", "merge"],
) -> None:
    """A step with lr 1 on ½‖w − x‖² ends at the mean of its mini-batch: one job ends with each step."""
    train = _points(2)
    task = Quadratic(tuple(map(tuple, train.x.tolist())))
    local = LocalTraining(steps=7, batch_size=4, lr=1.0, last_batch=last_batch)
    jobs, means = [], []
    for samples in (4, 5, 9) if last_batch == "drop" else (1, 3, 4, 5, 9):
        order = batches(samples, local, np.random.default_rng(samples))
        for steps in range(1, 8):
            job = _quadratic(0, steps, lr=1.0)
            job.indices, job.local = np.arange(10, 10 + samples), local
            job.rng = functools.partial(np.random.default_rng, samples)
            jobs.append(job)
            means.append(train.x[10 + next(order).numpy()].mean(0) * train.scale)
    ends = [result.end for result in BatchTrainer(task, train).run(jobs)]
    np.testing.assert_allclose(ends, means, rtol=1e-5, atol=1e-6)


def _digits_step(pixel: int, label: int, bias: float, l2: float) -> Outcome:
    """A step with lr ½ on one sample, whose first pixel is not 0, from weights that are 0 but for the
    bias of class 0."""
    x = np.zeros((1, 8, 8), np.uint8)
    x[0, 0, 0] = pixel
    job = _quadratic(0, steps=1)
    job.start = np.zeros(650, np.float32)
    job.start[640] = bias
    (result,) = BatchTrainer(DigitsLogreg(l2=l2), Shard(x, np.array([label]), scale=0.2)).run([job])
    return result


def test_logistic_step_by_hand() -> None:
    """Zero weights, one sample x = (1, 0, …) of class 3: p = ⅒ for each class."""
    result = _digits_step(pixel=5, label=3, bias=0.0, l2=0.3)
    expected = np.full(10, -0.05)
    expected[3] = 0.45
    np.testing.assert_allclose(result.end[0:640:64], expected, rtol=1e-6)
    np.testing.assert_allclose(result.end[640:], expected, rtol=1e-6)
    assert not result.end[:640].reshape(10, 64)[:, 1:].any()
    assert result.loss == pytest.approx(np.log(10))


def test_large_logits_do_not_overflow() -> None:
    """Class 0 has a bias of 200, the sample is of class 1: p = (1, 0, …), and the loss is 200."""
    result = _digits_step(pixel=0, label=1, bias=200.0, l2=0.0)
    assert result.end[640:].tolist() == [199.5, 0.5, 0, 0, 0, 0, 0, 0, 0, 0]
    assert result.loss == 200


def test_results_are_in_job_order() -> None:
    jobs = [_quadratic(k % 3, steps=k % 4, gradient=k % 5 == 0) for k in range(1000)]
    results = _centers().run(jobs)
    for k in (0, 1, 2, 3, 4, 5, 496, 999):
        center, left = np.array(CENTERS[k % 3]), 0.5 ** (k % 4)
        end = -center if k % 5 == 0 else (1 - left) * center
        np.testing.assert_allclose(results[k].end, end)


def test_many_jobs_give_the_results_of_single_ones() -> None:
    """More than are stacked, of which more than share a gather of samples."""
    task, train = LARGE["mnist-logreg"]
    rng = np.random.default_rng(0)
    starts = rng.normal(0, 0.05, (40, 7850)).astype(np.float32)
    local = LocalTraining(steps=1, batch_size=32, lr=0.1)

    def job(k: int) -> Job:
        return Job(
            start=starts[k],
            indices=np.arange(k, 60),
            local=local,
            lr=0.1,
            steps=1 + k % 3,
            rng=functools.partial(np.random.default_rng, k),
        )

    trainer = BatchTrainer(task, train)
    together = trainer.run([job(k) for k in range(40)])
    for k, result in enumerate(together):
        (alone,) = trainer.run([job(k)])
        np.testing.assert_allclose(result.end, alone.end, rtol=1e-4, atol=1e-6)
        assert result.loss == pytest.approx(alone.loss, rel=1e-5)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("task", ["module", "own loss"])
def test_each_model_of_a_stack_equals_the_clients(
    task: str, gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 of 30 clients have mini-batches of one size; too few of the others are alike."""
    stacked: list[int] = []
    many = AnyModule._many

    def counted(self: AnyModule, w: Any, rows: Any, out: Any) -> Any:
        stacked.append(len(w))
        return many(self, w, rows, out)

    jobs = [job for _ in range(6) for job in _jobs(*TASKS[task], OPTIONS["all"], gradient=gradient)]
    trainer = BatchTrainer(*TASKS[task])
    monkeypatch.setattr(AnyModule, "_many", counted)
    results, again = trainer.run(jobs), trainer.run(jobs)
    assert max(stacked) == 12
    _assert_like_the_clients(*TASKS[task], jobs, results, (1e-5, 1e-5))
    for first, second in zip(results, again, strict=True):
        np.testing.assert_array_equal(first.end, second.end)


class Peculiar(nn.Linear):
    """Looks at values, which vmap refuses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


@dataclass(frozen=True)
class Own(Tiny):
    layer: Callable[[], nn.Module] = nn.Identity

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), self.layer(), nn.Linear(3, 2))


def test_unstackable_models_are_trained_one_by_one() -> None:
    task, train = Own(layer=functools.partial(Peculiar, 3, 3)), _points(4)
    trainer = BatchTrainer(task, train)
    assert trainer.remark is not None
    assert "torch.func.vmap does not work with the model: vmap: It looks like you" in trainer.remark
    jobs = _jobs(task, train, {}) * 3
    _assert_like_the_clients(task, train, jobs, trainer.run(jobs), CLOSE)
    normed = Own(layer=functools.partial(nn.BatchNorm1d, 3)), train
    for quiet in (TASKS["module"], LARGE["mnist-cnn"], normed):
        assert BatchTrainer(*quiet).remark is None


@pytest.mark.parametrize("gradient", [False, True])
def test_dropout_draws_per_training_like_the_client(gradient: bool) -> None:
    """Draws are the same in every process and after any other training."""
    task, train = Own(layer=nn.Dropout), _points(4)
    jobs = _jobs(task, train, {}, gradient=gradient)
    trainer = BatchTrainer(task, train)
    results, reverse = trainer.run(jobs), trainer.run(jobs[::-1])[::-1]
    for seed, (own, job, result) in enumerate(
        zip(_trainers(task, train, jobs), jobs, results, strict=True)
    ):
        own.warm_up()
        rng, other = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        expected = own.gradient(job.start, rng) if gradient else own.train(job.start, rng, job.lr)
        np.testing.assert_array_equal(result.end, expected.end)
        np.testing.assert_array_equal(reverse[seed].end, expected.end)
        if len(job.indices) > 1:
            continue
        differs = own.gradient(job.start, other) if gradient else own.train(job.start, other, job.lr)
        assert not np.array_equal(differs.end, expected.end)  # one sample: it is dropout's


def test_zero_steps_return_the_start_without_a_loss() -> None:
    results = _centers().run([_quadratic(0, steps=0), _quadratic(1, steps=1), _quadratic(2, steps=0)])
    assert [result.end.tolist() for result in results] == [[0, 0], [0.5, -0.5], [0, 0]]
    assert [np.isnan(result.loss) for result in results] == [True, False, True]
    assert _centers().run([]) == []


@pytest.mark.parametrize("task", TASKS)
def test_equal_jobs_give_equal_results(task: str) -> None:
    trainer = BatchTrainer(*TASKS[task])
    first, second = (trainer.run(_jobs(*TASKS[task], OPTIONS["all"])) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.end, other.end)
        assert one.loss == other.loss


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_results_do_not_share_memory(task: str, gradient: bool) -> None:
    jobs = _jobs(*TASKS[task], OPTIONS["plain"], gradient=gradient)
    starts = [job.start.copy() for job in jobs]
    trainer = BatchTrainer(*TASKS[task])
    results = trainer.run(jobs)
    kept = [result.end.copy() for result in results]
    trainer.run(_jobs(*TASKS[task], OPTIONS["momentum"], gradient=gradient))
    for job, start, result, end in zip(jobs, starts, results, kept, strict=True):
        assert result.end.base is None
        np.testing.assert_array_equal(result.end, end)
        np.testing.assert_array_equal(job.start, start)


def test_diverging_model_does_not_affect_others() -> None:
    task, train = TASKS["logistic"]
    jobs = _jobs(task, train, OPTIONS["momentum"])
    sane = BatchTrainer(task, train).run(_jobs(task, train, OPTIONS["momentum"]))
    jobs[0] = dataclasses.replace(jobs[0], lr=1e30)
    results = BatchTrainer(task, train).run(jobs)
    assert not np.isfinite(results[0].end).all()
    for result, expected in zip(results[1:], sane[1:], strict=True):
        np.testing.assert_array_equal(result.end, expected.end)
