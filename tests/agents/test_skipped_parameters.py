"""Parameters on which the loss does not depend, always or in some steps: as torch's own optimizers have
it, to the last bit. And parameters that share memory, which are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from agents.client.training import Trainer, batches, make_trainer
from agents.config import LocalTraining
from agents.models.flat import FlatModule, initial
from agents.shards import Shard
from agents.tasks.interface import Task
from testbed.virtual.stacked_training import BatchTrainer, Job
from tests.agents.test_training import torch_optimizer

_RNG = np.random.default_rng(5)
SHARD = Shard(_RNG.normal(size=(40, 4)).astype(np.float32), _RNG.integers(0, 2, 40))


class UnusedHead(nn.Module):
    """A layer that is not in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.head = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.body(x).tanh())
        return outputs


class Branches(UnusedHead):
    """A model whose layer depends on the mini-batch's values: each layer is skipped in some steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x).tanh()
        outputs: torch.Tensor = self.head(hidden if x.sum() > 0 else self.unused(hidden))
        return outputs if x[0, 0] > 0 else outputs.detach() + x[:, :2] * self.head.bias


class Later(UnusedHead):
    """A model whose first 4 of 12 steps use all layers."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x).tanh()
        outputs: torch.Tensor = self.head(hidden if self.calls % 12 >= 4 else self.unused(hidden))
        self.calls += 1
        return outputs


@dataclass(frozen=True)
class Partial(Task):
    dataset: ClassVar[str] = "none"
    build: Callable[[], nn.Module] = UnusedHead
    l2: float = 0.0

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return self.build()


LOCALS = {
    "decay": LocalTraining(steps=12, batch_size=8, lr=0.1, weight_decay=0.1),
    "momentum": LocalTraining(steps=12, batch_size=8, lr=0.1, weight_decay=0.1, momentum=0.9),
    "adam": LocalTraining(steps=12, batch_size=8, lr=0.1, weight_decay=0.1, optimizer="adam"),
    "adamw": LocalTraining(steps=12, batch_size=8, lr=0.1, weight_decay=0.1, optimizer="adamw"),
}


def job_of(task: Task, local: LocalTraining, seed: int) -> Job:
    """A client's training in virtual time, on all samples."""
    return Job(
        start=initial(task.model()),
        indices=np.arange(len(SHARD)),
        local=local,
        lr=local.lr,
        steps=12,
        rng=lambda: np.random.default_rng(seed),
    )


def torchs(
    local: LocalTraining, module: nn.Module, rng: np.random.Generator
) -> tuple[np.ndarray, set[str]]:
    """Return the result of plain PyTorch, and the parameters that it skipped in some steps but not in
    all."""
    optimizer = torch_optimizer(local, module)
    order = batches(len(SHARD), local, rng)
    seen: dict[str, set[bool]] = {name: set() for name, _ in module.named_parameters()}
    for _ in range(local.count(len(SHARD))):
        batch = next(order)
        x, y = torch.from_numpy(SHARD.x)[batch], torch.from_numpy(SHARD.y)[batch]
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        for name, parameter in module.named_parameters():
            seen[name].add(parameter.grad is None)
        optimizer.step()
    return initial(module), {name for name, found in seen.items() if len(found) == 2}


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("build", [UnusedHead, Branches, Later])
def test_parameters_without_gradient_stay_unchanged(build: Callable[[], nn.Module], local: str) -> None:
    task = Partial(build=build)
    trainer = Trainer(task, SHARD, LOCALS[local])
    start = initial(task.model())
    for seed in (1, 2, 1):  # nothing is left of one training in the next
        expected, sometimes = torchs(LOCALS[local], task.model(), np.random.default_rng(seed))
        end = trainer.train(start, np.random.default_rng(seed)).end
        np.testing.assert_array_equal(end, expected)
        assert bool(sometimes) == (build is not UnusedHead)


@pytest.mark.parametrize("more", [{"proximal": 0.5}, {}], ids=["proximal", "l2"])
def test_proximal_and_l2_terms_train_every_parameter(more: dict[str, Any]) -> None:
    """(μ/2)‖w − w_b‖² and (l2/2)‖w‖² depend on every parameter: weight decay acts on all."""
    task = Partial(l2=0.0 if more else 0.1)
    start = initial(task.model())
    local = LocalTraining(steps=3, batch_size=8, lr=0.1, weight_decay=0.1, **more)
    end = Trainer(task, SHARD, local).train(start, np.random.default_rng(1)).end
    unused = slice(-12, None)
    assert np.linalg.norm(end[unused]) < 0.99 * np.linalg.norm(start[unused])


@pytest.mark.parametrize("local", ["decay", "momentum", "adamw"])
@pytest.mark.parametrize("build", [UnusedHead, Branches])
def test_parameters_without_gradient_are_skipped_in_virtual_time(
    build: Callable[[], nn.Module], local: str
) -> None:
    """Alone, and where there are enough clients to stack their models."""
    task = Partial(build=build)
    start = initial(task.model())
    trainer, settings = BatchTrainer(task, SHARD), LOCALS[local]
    own = Trainer(task, SHARD, settings)
    for count in (1, 20):
        jobs = [job_of(task, settings, seed) for seed in range(count)]
        for seed, result in enumerate(trainer.run(jobs)):
            expected = own.train(start, np.random.default_rng(seed))
            np.testing.assert_array_equal(result.end, expected.end)
            assert result.loss == expected.loss


def test_zero_gradient_without_decay_and_momentum_allows_stacking() -> None:
    """The models are stacked in this case."""
    task = Partial()
    local = LocalTraining(steps=12, batch_size=8, lr=0.1)
    start = initial(task.model())
    results = BatchTrainer(task, SHARD).run([job_of(task, local, seed=1)] * 20)
    expected, _ = torchs(local, task.model(), np.random.default_rng(1))
    np.testing.assert_allclose(results[7].end, expected, atol=1e-6)
    np.testing.assert_array_equal(results[7].end[-12:], start[-12:])


@dataclass(frozen=True)
class OwnFit(Partial):
    """A training that clears its gradients after a step, as many people write it, and not before."""

    fits: ClassVar[bool] = True

    def fit(self, module: nn.Module, shard: Shard, lr: float) -> float:
        optimizer = torch.optim.AdamW(module.parameters(), lr, weight_decay=0.1)
        x, y = torch.from_numpy(shard.x), torch.from_numpy(shard.y)
        nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return 0.0


def test_own_fit_starts_without_gradients() -> None:
    task = OwnFit()
    trainer = make_trainer(task, SHARD, LocalTraining(steps=1, lr=0.1))
    start = initial(task.model())
    plain = task.model()
    task.fit(plain, SHARD, 0.1)
    for _ in range(2):
        end = trainer.train(start, np.random.default_rng(1)).end
        np.testing.assert_array_equal(end, initial(plain))


def tied() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight.data = first.weight.data
    return nn.Sequential(first, second)


def tied_to_a_part() -> nn.Module:
    first, second = nn.Linear(4, 3), nn.Linear(3, 2)
    second.weight.data = first.weight.data.t()[1:3]
    return nn.Sequential(first, second)


def tied_to_a_frozen_one() -> nn.Module:
    module = tied()
    module.get_parameter("0.weight").requires_grad_(False)
    return module


def tied_to_a_buffer() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_buffer("seen", module.weight.data)
    return module


def expanded() -> nn.Module:
    module = nn.Linear(3, 3)
    module.bias = nn.Parameter(torch.zeros(1).expand(3))
    return module


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (tied, r"that share memory \(0.weight and 1.weight share memory\)"),
        (tied_to_a_part, r"\(0.weight and 1.weight share memory\)"),
        (tied_to_a_frozen_one, r"\(1.weight and 0.weight share memory\)"),
        (tied_to_a_buffer, r"\(weight and seen share memory\)"),
        (expanded, r"\(bias is expanded\)"),
        (lambda: nn.LazyLinear(3), r"lazy parameters, which have no shape yet \(weight, bias\)"),
        (lambda: nn.Sequential(nn.Linear(2, 3), nn.LazyBatchNorm1d()), r"lazy parameters.*\(1.weight"),
    ],
)
def test_parameters_without_memory_of_their_own_are_refused_by_name(
    build: Callable[[], nn.Module], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        FlatModule(build())
    with pytest.raises(ValueError, match=told):
        initial(build())


def test_parameters_that_are_parts_of_one_tensor_are_not_tied() -> None:
    """Query, key and value as columns of one matrix; two layers with one parameter; a scalar."""
    whole = torch.randn(4, 6)
    module = nn.ParameterDict(
        {name: nn.Parameter(part) for name, part in zip("qkv", whole.chunk(3, 1), strict=True)}
    )
    shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shared[1].weight = shared[0].weight
    shared.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    shared.register_parameter("scalar", nn.Parameter(torch.tensor(2.0)))
    assert FlatModule(module).w.numel() == 24
    assert FlatModule(shared).w.numel() == 9 + 3 + 3 + 1
