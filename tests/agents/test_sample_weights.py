"""Weights of samples in a loss: Σ weight · loss ÷ Σ weight, as torch has it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from agents.aggregator.evaluation import Evaluator
from agents.client.training import Trainer, batches
from agents.config import LocalTraining
from agents.models.flat import initial
from agents.shards import Parts, Shard
from agents.tasks.interface import Task
from testbed.virtual.stacked_training import BatchTrainer, Job

CLASSES = torch.tensor([4.0, 1.0, 0.5])
_RNG = np.random.default_rng(5)
SHARD = Shard(_RNG.normal(size=(40, 4)).astype(np.float32), _RNG.integers(0, 3, 40))
LOCAL = LocalTraining(steps=9, batch_size=8, lr=0.3)


@dataclass(frozen=True)
class Rare(Task):
    dataset: ClassVar[str] = "none"

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))

    def weights(self, y: torch.Tensor) -> torch.Tensor:
        return CLASSES[y]


def torchs(rng: np.random.Generator) -> np.ndarray:
    module = Rare().model()
    optimizer = torch.optim.SGD(module.parameters(), LOCAL.lr)
    order = batches(len(SHARD), LOCAL, rng)
    for _ in range(9):
        batch = next(order)
        x, y = torch.from_numpy(SHARD.x)[batch], torch.from_numpy(SHARD.y)[batch]
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y, weight=CLASSES).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return initial(module)


START = initial(Rare().model())


def test_training_equals_torchs_weighted_loss() -> None:
    end = Trainer(Rare(), SHARD, LOCAL).train(START, np.random.default_rng(1)).end
    np.testing.assert_allclose(end, torchs(np.random.default_rng(1)), atol=1e-6)


@pytest.mark.parametrize("clients", [1, 20])
def test_sample_weights_apply_in_virtual_time(clients: int) -> None:
    """One model after the other, and stacked."""
    job = Job(
        start=START,
        indices=np.arange(len(SHARD)),
        local=LOCAL,
        lr=LOCAL.lr,
        steps=9,
        rng=lambda: np.random.default_rng(1),
    )
    for result in BatchTrainer(Rare(), SHARD).run([job] * clients):
        np.testing.assert_allclose(result.end, torchs(np.random.default_rng(1)), atol=1e-5)


@pytest.mark.parametrize("clients", [0, 1, 20])
def test_mini_batch_without_weight_changes_nothing(
    clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the client (0), and in virtual time."""
    monkeypatch.setattr(Rare, "weights", lambda _, y: (y > 0).float())
    shard, local = Shard(SHARD.x, np.zeros_like(SHARD.y)), replace(LOCAL, steps=3)
    rng = np.random.default_rng(1)
    job = Job(
        start=START, indices=np.arange(40), local=local, lr=local.lr, steps=3, rng=lambda: rng
    )  # fmt: skip
    if clients:
        found = [(one.end, one.loss) for one in BatchTrainer(Rare(), shard).run([job] * clients)]
    else:
        result = Trainer(Rare(), shard, local).train(START, rng)
        found = [(result.end, result.loss)]
    for end, loss in found:
        assert (end == START).all()
        assert loss == 0.0


def test_sample_weights_apply_in_evaluations() -> None:
    parts = Parts(classes=True, device_set=SHARD, device_samples={"a": 10, "b": 30})
    found = Evaluator(Rare(), SHARD, lambda _: None, parts=parts).evaluate(1, START)
    outputs, y = Rare().model()(torch.from_numpy(SHARD.x)), torch.from_numpy(SHARD.y)

    def loss(chosen: object) -> float:
        return nn.functional.cross_entropy(outputs[chosen], y[chosen], weight=CLASSES).item()  # type: ignore[index]

    chosen = [y == 0, y == 1, y == 2, slice(0, 10), slice(10, None)]
    losses = [part.loss for part in found.parts]
    assert losses == pytest.approx([loss(one) for one in chosen], rel=1e-5)
    assert found.loss == pytest.approx(loss(slice(None)), rel=1e-5)


def test_class_without_weight_has_the_plain_mean_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Rare, "weights", lambda _, y: (y > 0).float())
    parts = Parts(classes=True)
    found = Evaluator(Rare(), SHARD, lambda _: None, parts=parts).evaluate(1, START)
    outputs, y = Rare().model()(torch.from_numpy(SHARD.x)), torch.from_numpy(SHARD.y)
    mean = nn.functional.cross_entropy(outputs[y == 0], y[y == 0]).item()
    assert found.parts[0].loss == pytest.approx(mean, rel=1e-5)
