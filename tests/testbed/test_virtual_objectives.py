"""Objective of each task, and the number of models and samples it processes at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from agents.shards import Shard
from agents.tasks.interface import Task
from agents.tasks.logreg import DigitsLogreg
from agents.tasks.quadratic import Quadratic
from testbed.virtual.objectives import AnyModule, Scratch, Softmax, Squares, objective


@dataclass(frozen=True)
class Custom(Task):
    dataset: ClassVar[str] = "none"
    l2: float = 0.0
    layers: tuple[nn.Module, ...] = (nn.Flatten(), nn.Linear(4, 2))
    sequential: bool = True

    def model(self) -> nn.Module:
        return nn.Sequential(*self.layers) if self.sequential else nn.ModuleList(self.layers)


class OwnLoss(Custom):
    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs.sum(1) - y).square()


POINTS = Shard(np.zeros((3, 4), np.float32), np.zeros(3, np.int64))
IMAGES = Shard(np.zeros((3, 8, 8), np.uint8), np.zeros(3, np.int64))


def test_each_task_gets_its_fastest_objective() -> None:
    assert type(objective(Quadratic(((0.0, 1.0, 2.0, 3.0),)), POINTS)) is Squares
    assert type(objective(DigitsLogreg(), IMAGES)) is Softmax
    assert type(objective(Custom(), POINTS)) is Softmax
    for other in (
        OwnLoss(),
        Custom(sequential=False),
        Custom(layers=(nn.Linear(4, 2),)),
        Custom(layers=(nn.Flatten(0), nn.Linear(4, 2))),
        Custom(layers=(nn.Flatten(1, 2), nn.Linear(4, 2))),
    ):
        assert type(objective(other, POINTS)) is AnyModule


def test_choosing_an_objective_draws_no_random_numbers() -> None:
    before = torch.random.get_rng_state()
    objective(DigitsLogreg(), IMAGES)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("inputs", "classes", "models"),
    [
        (64, 10, 201),  # 2²⁰ // (8 · 10 · 65)
        (1, 2, 32_768),  # 2²⁰ // 32
        (65_535, 2, 1),  # exactly
        (65_535, 4, 1),  # not half a model
    ],
)
def test_stacked_models_fit_into_the_cache(inputs: int, classes: int, models: int) -> None:
    train = Shard(np.zeros((1, inputs), np.uint8), np.zeros(1, np.int64))
    assert Softmax(train, nn.Linear(inputs, classes)).stack_size(32) == models


@pytest.mark.parametrize(
    ("dtype", "width", "jobs"),
    [
        (np.uint8, 32, 64),  # 655,360 // (32 · 64 · 5)
        (np.float32, 32, 40),  # 655,360 // (32 · 64 · 8)
        (np.uint8, 2048, 1),  # exactly
        (np.uint8, 4096, 1),
    ],
)
def test_gathered_samples_fit_into_the_cache(dtype: type[np.generic], width: int, jobs: int) -> None:
    train = Shard(np.zeros((1, 64), dtype), np.zeros(1, np.int64))
    assert Softmax(train, nn.Linear(64, 10)).gather_size(width) == jobs


def test_number_of_points_processed_together() -> None:
    squares = Squares(Shard(np.zeros((3, 64), np.float32), np.zeros(3, np.int64)))
    assert squares.stack_size(32) == 80  # 655,360 // (4 · 32 · 64)
    assert squares.stack_size(2560) == 1  # exactly
    assert squares.stack_size(5120) == 1
    one = Squares(Shard(np.zeros((3, 1), np.float32), np.zeros(3, np.int64)))
    assert one.stack_size(1) == 163_840  # 655,360 // 4


def test_scratch_memory_is_reused_until_more_is_needed() -> None:
    scratch = Scratch(np.float32)
    first = scratch.array(2, 3)
    assert first.shape == (2, 3)
    assert first.dtype == np.float32
    assert np.shares_memory(first, scratch.array(3, 2))
    assert np.shares_memory(first, scratch.array(4))
    more = scratch.array(7)
    assert more.shape == (7,)
    assert not np.shares_memory(first, more)
