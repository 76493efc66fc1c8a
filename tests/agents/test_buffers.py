"""Models with buffers, such as BatchNorm's running statistics, through the real cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from agents import events
from agents.aggregator import actions as act
from agents.client.training import Trainer
from agents.config import LocalTraining
from agents.models import vectors
from agents.models.flat import FlatModule, buffers_of, first_model, initial, load_buffers
from agents.models.vectors import Buffers
from agents.rules.fedbuff import FedBuff
from agents.shards import Shard
from agents.tasks.interface import Task
from tests.agents.helpers import message, of, started


@dataclass(frozen=True)
class Normed(Task):
    """4 inputs, 6 hidden units with BatchNorm, 3 classes."""

    dataset: ClassVar[str] = "none"
    l2: float = 0.0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


RNG = np.random.default_rng(3)
SHARD = Shard(RNG.normal(size=(24, 4)).astype(np.float32), RNG.integers(0, 3, 24))


def held(*floats: float, count: int = 0) -> Buffers:
    return Buffers(np.array(floats, np.float32), np.array([count]))


def test_buffers_are_averaged_by_the_rules_weights_and_integers_are_the_newest() -> None:
    arrived = [(0.25, held(1, 10, count=9)), (0.75, held(5, 20, count=4))]
    new = vectors.averaged(held(100, 100), arrived, shares=False)
    assert new.floats.tolist() == [4, 17.5]
    assert new.integers.tolist() == [4]
    assert new.floats.dtype == np.float32


def test_old_buffers_keep_their_share_only_in_a_mean_of_models() -> None:
    one = [(0.25, held(8.0, count=1))]
    assert vectors.averaged(held(4.0), one, shares=True).floats.tolist() == [5]
    assert vectors.averaged(held(4.0), one, shares=False).floats.tolist() == [8]
    assert vectors.averaged(held(4.0), one * 8, shares=True).floats.tolist() == [8]


def test_updates_without_weight_leave_buffers_unchanged() -> None:
    new = vectors.averaged(held(4.0), [(0.0, held(8.0, count=5))], shares=False)
    assert (new.floats.tolist(), new.integers.tolist()) == ([4], [5])


def test_buffers_of_a_version_average_its_updates() -> None:
    """a is applied with the first version, c with neither: it came too late, as the rule says."""
    core, server = started(FedBuff(buffer_size=2))
    server.buffers = held(0.0)
    core.update("a", message("a", 1, buffers=held(2.0, count=5)), 4, 1.0)
    assert server.buffers.floats.tolist() == [0]
    core.update("b", message("b", 2, buffers=held(6.0, count=3)), 4, 2.0)
    assert (server.buffers.floats.tolist(), server.buffers.integers.tolist()) == ([4], [3])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (vectors.NONE, "0 numbers in its buffers, expected 2"),
        (held(1.0, 2.0), "3 numbers in its buffers, expected 2"),
        (held(float("nan")), "not finite"),
        (held(float("inf")), "not finite"),
    ],
)
def test_update_with_other_buffers_is_rejected(wrong: Buffers, told: str) -> None:
    core, server = started()
    server.buffers = held(0.0)
    done = core.update("a", message("a", 1, buffers=wrong), 4, 1.0)
    (rejected,) = [one.record for one in of(act.Log, done) if "reason" in dir(one.record)]
    assert isinstance(rejected, events.UpdateRejected)
    assert told in rejected.reason
    assert server.version == 0


def test_buffers_are_read_from_and_loaded_into_a_module() -> None:
    """All types that are sent are covered; non-persistent buffers are not part of the model's state."""
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    module.register_buffer("mask", torch.tensor([True, False]))
    module.register_buffer("short", torch.tensor([[0.5]], dtype=torch.float16))
    module.register_buffer("constant", torch.ones(7), persistent=False)
    assert buffers_of(module).floats.tolist() == [0.5, 0, 0, 1, 1]
    assert buffers_of(module).integers.tolist() == [1, 0, 0]
    new = Buffers(np.array([0.25, 1, 2, 3, 4], np.float32), np.array([0, 1, 2**40]))
    flat = FlatModule(module)
    flat.load(initial(module), new)
    assert buffers_of(module).equals(new)
    assert module[0].running_var.tolist() == [3, 4]  # type: ignore[operator]
    assert module.short.dtype == torch.float16
    with pytest.raises(ValueError, match="buffers have 1 numbers of one kind"):
        load_buffers(module, held(1.0))


def test_training_starts_from_the_models_buffers_and_returns_its_own() -> None:
    """Earlier trainings do not matter; without a step the buffers stay unchanged."""
    w, first, _ = first_model(Normed(), seed=5)
    trainer = Trainer(Normed(), SHARD, LocalTraining(steps=3, batch_size=8))
    trainer.warm_up()
    once, again = (trainer.train(w, np.random.default_rng(1), buffers=first) for _ in range(2))
    assert once.buffers.equals(again.buffers)
    assert once.buffers.integers.tolist() == [3]
    assert not np.array_equal(once.buffers.floats, first.floats)
    nothing = trainer.train(w, np.random.default_rng(1), stopped=lambda: True, buffers=once.buffers)
    assert nothing.buffers.equals(once.buffers)
    assert trainer.gradient(w, np.random.default_rng(1), first).buffers.integers.tolist() == [1]
