"""Gradients computed layer by layer, against those of autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from agents.config import LocalTraining
from agents.models.flat import FlatModule, initial
from agents.shards import Shard
from agents.tasks import TASKS
from agents.tasks.interface import Task, mean_loss
from testbed.virtual.layers import Layers
from testbed.virtual.objectives import AnyModule
from testbed.virtual.stacked_training import BatchTrainer, Job


@dataclass(frozen=True)
class Given(Task):
    dataset: ClassVar[str] = "none"
    module: nn.Module

    def model(self) -> nn.Module:
        return self.module


class Squared(Given):
    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs - y[:, None]).square().sum(1)


class Weighted(Given):
    def weights(self, y: torch.Tensor) -> torch.Tensor:
        return 1.0 + y


def _classes(inputs: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(inputs, 3)]


def _sequence(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers)


SEQUENCES: dict[str, tuple[list[nn.Module], tuple[int, ...]]] = {
    "one channel": ([nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), *_classes(36)], (1, 8, 8)),
    "odd size": ([nn.Conv2d(2, 3, 2), nn.MaxPool2d(2), nn.ReLU(), *_classes(18)], (2, 6, 8)),
    "windows that overlap": (
        [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), *_classes(48)],
        (2, 8, 8),
    ),
    "rounded up": ([nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, ceil_mode=True), *_classes(32)], (1, 8, 8)),
    "means": (
        [nn.Conv2d(2, 4, 3, stride=2, bias=False), nn.Tanh(), nn.AvgPool2d(2, 1), *_classes(16)],
        (2, 7, 7),
    ),
    "groups, dilation": (
        [nn.Conv2d(4, 4, 3, groups=2, dilation=2), nn.Sigmoid(), *_classes(64)],
        (4, 8, 8),
    ),
    "one channel, dilation": ([nn.Conv2d(1, 2, 3, dilation=2), *_classes(32)], (1, 8, 8)),
    "layers that do not learn come first": (
        [nn.Unflatten(1, (1, 8)), nn.ZeroPad2d(-1), nn.Conv2d(1, 2, 3), *_classes(32)],
        (8, 8),
    ),
    "sequence in a sequence": (
        [nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False), nn.ReLU()), nn.Linear(5, 3)],
        (3, 4),
    ),
}


def _compare(task: Task, x: torch.Tensor, y: torch.Tensor) -> None:
    flat = FlatModule(task.model())
    loss = mean_loss(task, flat.module(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = flat.gradient.clone()
    layers = Layers.from_module(task, flat.module)
    assert layers is not None
    flat.gradient.fill_(7)  # must be overwritten everywhere
    assert layers.differentiate(x, y) == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(flat.gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SEQUENCES)
def test_gradient_equals_autograds(name: str) -> None:
    layers, shape = SEQUENCES[name]
    _compare(Given(_sequence(*layers)), torch.rand(5, *shape), torch.tensor([0, 1, 2, 1, 0]))


@pytest.mark.parametrize("kind", [Squared, Weighted])
def test_loss_of_the_task_is_used(kind: type[Given]) -> None:
    layers, shape = SEQUENCES["means"]
    _compare(kind(_sequence(*layers)), torch.rand(5, *shape), torch.tensor([0, 1, 2, 1, 0]))


@pytest.mark.parametrize(
    "name",
    [
        "cifar10-cnn",
        "cifar10-cnn-mcmahan",
        "cifar10-cnn-small",
        "fashion-mnist-cnn",
        "mnist-cnn",
        "mnist-mlp",
    ],
)
def test_networks_of_the_tasks_are_recognised(name: str) -> None:
    task = TASKS[name]()
    shape = (3, 32, 32) if name.startswith("cifar10") else (28, 28)
    _compare(task, torch.rand(2, *shape), torch.tensor([3, 9]))


def test_of_equal_values_the_first_gets_the_gradient() -> None:
    # Small whole numbers, so that many values of a window are equal, and above zero.
    layers = _sequence(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    with torch.no_grad():
        layers[0].weight.fill_(1)  # type: ignore[operator]
        layers[0].bias.fill_(1)  # type: ignore[operator]
    x = torch.randint(0, 2, (64, 1, 8, 8)).float()
    _compare(Given(layers), x, torch.arange(64) % 3)


def test_embedding_of_tokens_that_are_there_several_times() -> None:
    layers = _sequence(nn.ZeroPad1d((-1, 0)), nn.Embedding(5, 2), *_classes(6))
    x = torch.tensor([[4, 0, 0, 0], [1, 2, 0, 2], [3, 1, 2, 3]])
    _compare(Given(layers), x, torch.tensor([0, 1, 2]))
    _compare(TASKS["shakespeare-mlp"](), torch.arange(160).view(2, 80) % 80, torch.tensor([3, 79]))


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(2),
        nn.GELU(),
        nn.MaxPool2d(2, return_indices=True),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.Flatten(2),
        nn.Embedding(3, 2, padding_idx=0),
    ],
)
def test_other_layers_are_left_to_autograd(layer: nn.Module) -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), layer, *_classes(1))
    assert Layers.from_module(Given(module), module) is None


def test_frozen_parameters_are_left_to_autograd() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    module[0].requires_grad_(False)
    assert Layers.from_module(Given(module), module) is None


def test_model_with_a_shared_parameter_is_trained_by_autograd_with_a_remark() -> None:
    shard = Shard(np.ones((4, 4), np.float32), np.arange(4) % 3)
    module = _sequence(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 3))
    plain = AnyModule(Given(module), shard, module)
    plain.accelerate()
    assert plain.remark is None
    assert plain._layers is not None
    module[2].weight = module[0].weight
    tied = AnyModule(Given(module), shard, module)
    tied.accelerate()
    assert tied.remark is not None
    assert "shared parameters" in tied.remark
    assert tied._layers is None


def test_results_have_the_same_bytes_on_one_and_two_threads() -> None:
    rng = np.random.default_rng(0)
    shard = Shard(rng.integers(0, 256, (40, 3, 32, 32), np.uint8), rng.integers(0, 10, 40), 1 / 255)
    task, local = TASKS["cifar10-cnn"](), LocalTraining(steps=2, batch_size=16, lr=0.1)
    start, threads = initial(task.model()), torch.get_num_threads()

    def job(k: int) -> Job:
        return Job(
            start=start,
            indices=np.arange(k, 40),
            local=local,
            lr=0.1,
            steps=2,
            rng=lambda: np.random.default_rng(k),
        )

    ends = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results = BatchTrainer(task, shard).run([job(k) for k in range(3)])
            ends.append([result.end.tobytes() for result in results])
    finally:
        torch.set_num_threads(threads)
    assert ends[0] == ends[1]
