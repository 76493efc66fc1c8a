"""Stacks of models trained by the code for GPUs, against the training on a CPU. The device is the CPU,
and a GPU where there is one."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from agents.shards import Shard
from agents.tasks.interface import Task
from agents.tasks.resnet import Cifar10ResNet18
from agents.tasks.shakespeare import ShakespeareLstm
from testbed.virtual.gpu_objective import GpuObjective
from testbed.virtual.objectives import AnyModule, objective
from testbed.virtual.stacked_training import BatchTrainer
from tests.testbed.test_virtual_training import (
    IMAGES,
    LARGE,
    OPTIONS,
    TASKS,
    Own,
    Peculiar,
    _images,
    _jobs,
    _points,
)

DEVICES = ["cpu:0", *(["cuda"] if torch.cuda.is_available() else [])]
"""`cpu:0` is the CPU, but not the device `cpu` for which there is faster code."""


def _characters() -> Shard:
    rng = np.random.default_rng(0)
    return Shard(rng.integers(0, 80, (60, 8)), rng.integers(0, 80, 60))


CASES: dict[str, tuple[Task, Shard]] = {
    "module": TASKS["module"],
    "own loss": TASKS["own loss"],
    "cifar10-cnn": LARGE["cifar10-cnn"],
    "lstm": (ShakespeareLstm(), _characters()),
    "resnet": (Cifar10ResNet18(norm="group"), _images(IMAGES["cifar"])),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_autograd(case: str, device: str) -> None:
    task, train = CASES[case]
    reference = objective(task, train)
    assert isinstance(reference, AnyModule)
    assert GpuObjective(task, train, device=device).difference(reference) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("case", "options", "gradient"),
    [
        *(("own loss", options, False) for options in OPTIONS),
        ("module", "plain", True),
        ("lstm", "plain", False),
    ],
)
def test_models_are_those_of_the_cpu(case: str, options: str, gradient: bool, device: str) -> None:
    """Five jobs are trained beside three models without a job. Their numbers of steps differ, and their
    mini-batches, which are padded. The second time, the step is recorded already."""
    task, train = CASES[case]
    jobs = _jobs(task, train, OPTIONS[options], gradient=gradient)
    trainer, expected = BatchTrainer(task, train, device=device), BatchTrainer(task, train).run(jobs)
    assert trainer.remark is None
    for _ in range(2):
        for one, other in zip(trainer.run(jobs), expected, strict=True):
            np.testing.assert_allclose(one.end, other.end, rtol=1e-4, atol=1e-5)
            assert one.loss == pytest.approx(other.loss, rel=1e-4)
            assert one.end.base is None


@pytest.mark.parametrize("device", DEVICES)
def test_models_that_cannot_be_stacked_are_trained_one_by_one(device: str) -> None:
    task, train = Own(layer=functools.partial(Peculiar, 3, 3)), _points(4)
    trainer, jobs = BatchTrainer(task, train, device=device), _jobs(task, train, {})
    assert trainer.remark is not None
    assert "one after the other on the GPU, because vmap" in trainer.remark
    for one, other in zip(trainer.run(jobs), BatchTrainer(task, train).run(jobs), strict=True):
        np.testing.assert_allclose(one.end, other.end, rtol=1e-4, atol=1e-6)


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    task, train = CASES["module"]
    reference = objective(task, train)
    assert isinstance(reference, AnyModule)
    stacked = GpuObjective(task, train, device="cpu:0")
    monkeypatch.setattr(stacked, "_scale", 1.1 * train.scale)
    assert stacked.difference(reference) == "the gradients differ"
