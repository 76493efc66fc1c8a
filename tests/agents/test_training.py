"""Local training against torch.optim and against arithmetic by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import nn

from agents.client import training
from agents.client.training import Trainer, batches
from agents.config import InitialModel, LocalTraining, Schedule
from agents.models.flat import FlatModule, initial, schema_hash
from agents.shards import Shard
from agents.tasks.interface import Task


@dataclass(frozen=True)
class Tiny(Task):
    """4 inputs, 3 hidden units, 2 classes: 23 parameters."""

    dataset: ClassVar[str] = "none"
    l2: float = 0.0

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


START = initial(Tiny().model())
_RNG = np.random.default_rng(5)
SHARD = Shard(_RNG.normal(size=(10, 4)).astype(np.float32), _RNG.integers(0, 2, 10), scale=0.5)


def _train(local: LocalTraining, task: Task | None = None, seed: int = 1) -> np.ndarray:
    """The progress: end minus start."""
    trainer = Trainer(task or Tiny(), SHARD, local)
    return trainer.train(START, np.random.default_rng(seed)).end - START


def torch_optimizer(local: LocalTraining, module: nn.Module) -> torch.optim.Optimizer:
    """torch's own optimizer with these settings."""
    if local.optimizer == "sgd":
        return torch.optim.SGD(
            module.parameters(), local.lr, local.momentum, weight_decay=local.weight_decay
        )
    kind = torch.optim.AdamW if local.optimizer == "adamw" else torch.optim.Adam
    betas = local.beta1, local.beta2
    return kind(module.parameters(), local.lr, betas, local.epsilon, local.weight_decay)


def _reference(local: LocalTraining, l2: float, steps: int, seed: int = 1) -> np.ndarray:
    """The reference: a plain module, autograd of the whole loss, and torch.optim.SGD."""
    module = Tiny().model()
    start = [p.detach().clone() for p in module.parameters()]
    optimizer = torch_optimizer(local, module)
    order = batches(10, local, np.random.default_rng(seed))
    x, y = torch.from_numpy(SHARD.x) * 0.5, torch.from_numpy(SHARD.y)
    for step in range(steps):
        batch = next(order)
        loss = nn.functional.cross_entropy(module(x[batch]), y[batch])
        for p, p0 in zip(module.parameters(), start, strict=True):
            loss = loss + l2 / 2 * p.square().sum() + local.proximal / 2 * (p - p0).square().sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if local.clip_gradient is not None:
            nn.utils.clip_grad_norm_(module.parameters(), local.clip_gradient)
        if local.lr_by_step is not None:
            optimizer.param_groups[0]["lr"] = local.lr * local.lr_by_step.factor(step)
        optimizer.step()
    return initial(module) - START


@pytest.mark.parametrize(
    ("local", "l2"),
    [
        (LocalTraining(steps=7, batch_size=4, lr=0.3), 0.0),
        (LocalTraining(steps=7, batch_size=4, lr=0.3, momentum=0.9), 0.0),
        (LocalTraining(steps=7, batch_size=4, lr=0.3, proximal=0.7), 0.0),
        (LocalTraining(steps=7, batch_size=4, lr=0.3), 0.2),
        (LocalTraining(steps=7, batch_size=4, lr=0.3, momentum=0.5, proximal=0.7), 0.2),
        (LocalTraining(steps=7, batch_size=4, lr=0.3, momentum=0.5, weight_decay=0.4), 0.2),
        (LocalTraining(steps=7, batch_size=4, lr=0.3, clip_gradient=0.1, weight_decay=0.4), 0.0),
        (
            LocalTraining(steps=7, batch_size=4, lr=0.3, clip_gradient=100.0),
            0.0,
        ),  # which no gradient has
        (LocalTraining(steps=7, batch_size=4, lr=0.3, lr_by_step=Schedule(over=5, to=0.1)), 0.0),
        (LocalTraining(steps=7, batch_size=4, lr=0.03, optimizer="adam", weight_decay=0.4), 0.2),
        (
            LocalTraining(
                steps=7, batch_size=4, lr=0.03, optimizer="adamw", weight_decay=0.4, beta1=0.5
            ),
            0.0,
        ),
        (LocalTraining(steps=7, batch_size=4, lr=0.03, optimizer="adam", beta2=0.9, epsilon=0.1), 0.0),
    ],
)
def test_training_equals_torchs_optimizers(local: LocalTraining, l2: float) -> None:
    np.testing.assert_allclose(_train(local, Tiny(l2)), _reference(local, l2, 7), atol=1e-6)


def test_one_step_by_hand() -> None:
    """Zero weights, one sample x = (1, 2) of class 0: p = ½, so g = −½ x for class 0 and ½ x for 1."""

    @dataclass(frozen=True)
    class Linear(Task):
        dataset: ClassVar[str] = "none"
        l2: float = 0.0

        def model(self) -> nn.Module:
            return nn.Linear(2, 2, bias=False)

    shard = Shard(np.array([[10, 20]], np.uint8), np.array([0]), scale=0.1)
    trainer = Trainer(Linear(), shard, LocalTraining(steps=1, lr=0.5))
    result = trainer.train(np.zeros(4, np.float32), np.random.default_rng(0))
    assert result.end.tolist() == pytest.approx([0.25, 0.5, -0.25, -0.5])
    assert result.loss == pytest.approx(np.log(2))
    assert result.steps == 1


def test_the_loss_is_the_mean_over_the_steps_with_the_l2_term() -> None:
    standing_still = Trainer(Tiny(l2=0.2), SHARD, LocalTraining(steps=3, batch_size=10, lr=0.0))
    result = standing_still.train(START, np.random.default_rng(1))
    logits = Tiny().model()(torch.from_numpy(SHARD.x) * 0.5)
    loss = nn.functional.cross_entropy(logits, torch.from_numpy(SHARD.y)).item()
    assert result.loss == pytest.approx(loss + 0.1 * float(START @ START))


def test_step_size_sent_with_the_model_is_used() -> None:
    trainer = Trainer(Tiny(), SHARD, LocalTraining(steps=5, lr=0.1))
    end = trainer.train(START, np.random.default_rng(1), lr=0.3).end
    np.testing.assert_array_equal(end - START, _train(LocalTraining(steps=5, lr=0.3)))


def test_gradient_equals_one_step_of_size_one() -> None:
    local = LocalTraining(steps=5, batch_size=4, lr=1.0, momentum=0.9)
    result = Trainer(Tiny(l2=0.2), SHARD, local).gradient(START, np.random.default_rng(1))
    np.testing.assert_allclose(-result.end, _reference(local, 0.2, 1), atol=1e-6)
    assert result.steps == 1


def test_clip_gradient_bounds_a_sent_gradient() -> None:
    for bound in (0.01, 0.001):
        trainer = Trainer(Tiny(), SHARD, LocalTraining(steps=1, clip_gradient=bound))
        sent = trainer.gradient(START, np.random.default_rng(0)).end
        assert np.linalg.norm(sent) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (Schedule(over=4), [1, 0.75, 0.5, 0.25, 0, 0]),
        (Schedule(over=4, to=0.5, every=2), [1, 1, 0.75, 0.75, 0.5, 0.5]),
        (Schedule(shape="cosine", over=4, to=0.2), [1, 0.88284, 0.6, 0.31716, 0.2, 0.2]),
        (Schedule(shape="exponential", over=2, to=0.25), [1, 0.5, 0.25, 0.125]),
        (Schedule(shape="exponential", over=2, to=0.1, every=2), [1, 1, 0.1, 0.1, 0.01]),
        (Schedule(over=2, warmup=3), [0.25, 0.5, 0.75, 1, 0.5, 0]),
    ],
)
def test_schedules_by_hand(schedule: Schedule, factors: list[float]) -> None:
    assert [schedule.factor(n) for n in range(len(factors))] == pytest.approx(factors, abs=1e-5)


def test_learning_rate_schedule_follows_the_version() -> None:
    local = LocalTraining(lr=0.4, lr_by_version=Schedule(over=10))
    assert local.rate(0) == 0.4
    assert local.rate(5) == pytest.approx(0.2)
    assert local.rate(5, assigned=0.1) == pytest.approx(0.05)
    assert LocalTraining(lr=0.4).rate(5) == 0.4


def test_bfloat16_is_near_float32_and_the_vector_stays_float32() -> None:
    full, mixed = (
        _train(LocalTraining(steps=5, lr=0.3, precision=precision))
        for precision in ("float32", "bfloat16")
    )
    assert mixed.dtype == np.float32
    np.testing.assert_allclose(mixed, full, atol=0.02)
    assert not np.array_equal(mixed, full)


@dataclass(frozen=True)
class Scaled(Tiny):
    """A task whose loss is multiplied by `factor`."""

    factor: float = 1.0

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.factor * super().loss(outputs, y)


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e4])
def test_float16_scaling_preserves_small_and_large_gradients(factor: float) -> None:
    """float16 has numbers from 6e-8 to 65504. The behaviour is the same on the CPU, where a topology
    does not allow it."""
    half, full = (
        _train(
            LocalTraining(steps=20, batch_size=4, lr=0.5 / factor, precision=kind), Scaled(factor=factor)
        )
        for kind in ("float16", "float32")
    )
    assert np.linalg.norm(half - full) < 0.02 * np.linalg.norm(full)
    assert half.any()


def test_loss_of_nan_ends_the_search_for_a_scale() -> None:
    trainer = Trainer(Scaled(factor=math.inf), SHARD, LocalTraining(steps=2, precision="float16"))
    assert not math.isfinite(trainer.train(START, np.random.default_rng(1)).loss)


def test_frozen_parameters_are_neither_trained_nor_sent() -> None:
    frozen = InitialModel(frozen=("0.*",))
    trainer = Trainer(Tiny(), SHARD, LocalTraining(steps=5, lr=0.3, optimizer="adam"), frozen)
    before = {name: p.clone() for name, p in trainer.flat.module.named_parameters()}
    start = initial(trainer.flat.module)
    assert start.size == 3 * 2 + 2
    end = trainer.train(start, np.random.default_rng(1)).end
    after = dict(trainer.flat.module.named_parameters())
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["2.weight"], before["2.weight"])
    assert end.tolist() == [*after["2.weight"].flatten().tolist(), *after["2.bias"].tolist()]
    assert schema_hash(trainer.flat.module) != schema_hash(Tiny().model())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_depends_only_on_start_and_seed(optimizer: Literal["sgd", "adam"]) -> None:
    """The optimizer's state is reset for each training."""
    momentum = 0.9 if optimizer == "sgd" else 0.0
    local = LocalTraining(steps=5, batch_size=4, momentum=momentum, optimizer=optimizer)
    trainer = Trainer(Tiny(), SHARD, local)
    trainer.warm_up()
    for _ in range(2):
        result = trainer.train(START, np.random.default_rng(1))
        np.testing.assert_array_equal(result.end - START, _train(local))
    assert not np.array_equal(_train(local, seed=2), _train(local))


def test_trainer_leaves_its_shard_unchanged() -> None:
    before = SHARD.x.copy()
    Trainer(Tiny(), SHARD, LocalTraining(steps=1))
    np.testing.assert_array_equal(SHARD.x, before)


def test_clip_norm_is_exact_for_many_equal_elements() -> None:
    """torch's own norm, in float32, would be off by 0.1 % and more."""
    length = training._length(torch.full((10_000_000,), 0.1))
    assert length == pytest.approx(float(np.float32(0.1)) * math.sqrt(1e7), rel=1e-9)


def test_clip_bounds_the_update_and_keeps_its_direction() -> None:
    free = _train(LocalTraining(steps=5, lr=1.0))
    length = float(np.linalg.norm(free))
    clipped = _train(LocalTraining(steps=5, lr=1.0, clip=length / 2))
    np.testing.assert_allclose(clipped, free / 2, atol=1e-5)
    np.testing.assert_allclose(_train(LocalTraining(steps=5, lr=1.0, clip=length * 2)), free, atol=1e-6)


@pytest.mark.parametrize(
    ("local", "steps"),
    [
        (LocalTraining(steps=7), 7),
        (LocalTraining(epochs=1, batch_size=10), 1),
        (LocalTraining(epochs=1, batch_size=100), 1),
        (LocalTraining(epochs=2, batch_size=4), 6),  # 4 + 4 + 2 samples, twice
    ],
)
def test_steps_by_local_settings(local: LocalTraining, steps: int) -> None:
    assert local.count(len(SHARD)) == steps
    trainer = Trainer(Tiny(), SHARD, local)
    assert trainer.train(START, np.random.default_rng(0)).steps == steps


BATCHES = [
    ("keep", {1: [1], 3: [3], 4: [4], 5: [4, 1], 9: [4, 4, 1]}),
    ("drop", {1: [], 3: [], 4: [4], 5: [4], 9: [4, 4]}),
    ("merge", {1: [1], 3: [3], 4: [4], 5: [5], 9: [4, 5]}),
]
"""last_batch, and the sizes of a pass's mini-batches by number of samples; batch_size is 4."""


@pytest.mark.parametrize(("last_batch", "passes"), BATCHES)
def test_last_batch_is_kept_dropped_or_merged(
    last_batch: Literal["keep", "drop", "merge"], passes: dict[int, list[int]]
) -> None:
    """The mini-batches are consecutive parts of one permutation for each pass; a mini-batch of all
    samples is in the order of the shard."""
    for samples, sizes in passes.items():
        local = LocalTraining(epochs=2, batch_size=4, last_batch=last_batch)
        assert local.count(samples) == 2 * len(sizes)
        rng, order = np.random.default_rng(7), batches(samples, local, np.random.default_rng(7))
        found = [[next(order).tolist() for _ in sizes] for _ in range(2)]
        for epoch in found if sizes else []:
            drawn = (np.arange(samples) if sizes == [samples] else rng.permutation(samples)).tolist()
            ends = np.cumsum(sizes).tolist()
            assert epoch == [drawn[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        assert sizes or list(order) == []  # without a mini-batch there is nothing to wait for


def test_work_counts_a_merged_batch_by_its_samples() -> None:
    merged = LocalTraining(epochs=2, batch_size=4, last_batch="merge")
    assert [merged.work(samples) for samples in (0, 1, 4, 5, 9)] == [0, 2, 2, 2.5, 4.5]
    by_steps = LocalTraining(steps=3, batch_size=4, last_batch="merge")
    assert by_steps.work(9) == 3.25  # 4, 5 and 4 samples
    assert LocalTraining(steps=3, batch_size=4).work(9) == 3
    assert LocalTraining(steps=3, batch_size=4, last_batch="drop").work(3) == 0


def test_warm_up_without_a_mini_batch_does_nothing() -> None:
    nothing = Shard(SHARD.x[:3], SHARD.y[:3])
    trainer = Trainer(Tiny(), nothing, LocalTraining(epochs=1, batch_size=4, last_batch="drop"))
    trainer.warm_up()
    result = trainer.train(START, np.random.default_rng(0))
    assert result.steps == 0
    np.testing.assert_array_equal(result.end, START)


def test_interrupted_training_returns_the_steps_done() -> None:
    trainer = Trainer(Tiny(), SHARD, LocalTraining(steps=1000, batch_size=4))
    asked = iter([False, False, True])
    result = trainer.train(START, np.random.default_rng(1), stopped=lambda: next(asked))
    assert result.steps == 2
    np.testing.assert_array_equal(result.end - START, _train(LocalTraining(steps=2, batch_size=4)))
    nothing = trainer.train(START, np.random.default_rng(1), stopped=lambda: True)
    assert nothing.steps == 0
    np.testing.assert_array_equal(nothing.end, START)


def test_the_module_is_a_view_of_the_flat_vector() -> None:
    flat = FlatModule(Tiny().model())
    vector = np.arange(23, dtype=np.float32)
    flat.load(vector)
    parameters = dict(flat.module.named_parameters())
    assert parameters["0.weight"].flatten().tolist() == list(range(12))
    assert parameters["2.bias"].tolist() == [21, 22]
    flat.w.zero_()
    assert not parameters["0.weight"].any()
    with pytest.raises(ValueError, match="broadcast"):
        flat.load(np.zeros(22, np.float32))


class Remembering(nn.Linear):
    """A module whose state has an entry that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__(2, 3)

    def get_extra_state(self) -> object:
        return {"seen": 7}


class Masked(nn.Linear):
    """A module whose state has a causal attention mask."""

    def __init__(self, least: float) -> None:
        super().__init__(2, 3)
        self.register_buffer("mask", torch.full((3, 3), least).triu(1))


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (Masked(-math.inf), r"not finite or .* above 1.8e19 \(mask\).*persistent=False"),
        (Masked(torch.finfo().min), r"not finite or .* above 1.8e19 \(mask\)"),
        (
            nn.Sequential(nn.Linear(2, 3), *(nn.BatchNorm1d(3, dtype=torch.float64, affine=False),) * 2),
            r"buffers.*\(1.running_mean: torch.float64, 1.running_var: torch.float64\)",
        ),
        (Remembering(), r"besides parameters and buffers \(_extra_state\)"),
        (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2).half()), r"not float32 \(1.weight"),
        (nn.Linear(2, 3).double(), r"not float32 \(weight: torch.float64, bias: torch.float64\)"),
        (
            nn.ParameterList([nn.Parameter(torch.tensor([2**30 + 1]), requires_grad=False)]),
            "all are frozen",
        ),
        (nn.Flatten(), "no parameters"),
    ],
    ids=["infinite", "huge", "buffers", "extra", "half", "double", "frozen", "empty"],
)
def test_model_that_does_not_fit_a_flat_vector_is_refused(module: nn.Module, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        FlatModule(module)
    with pytest.raises(ValueError, match=told):
        initial(module)


def test_schema_hash_distinguishes_models() -> None:
    assert schema_hash(nn.Linear(2, 3)) == schema_hash(nn.Linear(2, 3))
    different = [nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 3, bias=False), nn.Linear(4, 2)]
    normed = [nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)]
    assert len({schema_hash(module) for module in (*different, *normed)}) == 6
