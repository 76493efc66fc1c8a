"""Modules drawn at random, with what people attach to them: virtual time, the client and plain PyTorch
train them to the same end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from agents.client.training import Trainer
from agents.config import LocalTraining
from agents.models.flat import buffers_of, build, initial, learned, load_buffers
from agents.models.vectors import NONE
from agents.shards import Shard
from agents.tasks.interface import Task, mean_loss
from testbed.virtual.stacked_training import BatchTrainer, Job

INPUTS, CLASSES, SAMPLES, STEPS, LR = 6, 3, 24, 4, 0.2
DRAWN = 60


class Halved(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * 0.05  # type: ignore[no-untyped-call]


class Residual(nn.Module):
    """Uses a layer twice, and depends on the values of its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(torch.tanh(self.inner(x))) + self.shift
        return torch.where(x > 0, x, x + y)


class OwnLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.abs(), self.bias)


def _negate(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return -output


def _double(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (2 * args[0],)


def _hook(layer: nn.Module) -> None:
    layer.register_forward_hook(_negate)


def _hook_before(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(_double)


def _hook_gradient(layer: nn.Module) -> None:
    next(layer.parameters()).register_hook(lambda g: g / 2)  # type: ignore[no-untyped-call]


def _patch(layer: nn.Module) -> None:
    layer.forward = lambda x: type(layer).forward(layer, x) + 0.1


def _spectral(layer: nn.Module) -> None:
    parametrizations.orthogonal(layer)


def _normal(layer: nn.Module) -> None:
    parametrizations.weight_norm(layer)


def _old_normal(layer: nn.Module) -> None:
    weight_norm(layer)


ATTACHED: list[Callable[[nn.Module], None]] = [
    *(_hook, _hook_before, _hook_gradient, _patch, _spectral, _normal, _old_normal),
]
BETWEEN: list[Callable[[int], nn.Module]] = [
    lambda _: nn.ReLU(),
    lambda _: nn.Tanh(),
    lambda _: nn.Dropout(0.5),
    nn.BatchNorm1d,
    nn.LayerNorm,
    Residual,
    lambda size: OwnLinear(size, size),
    lambda size: nn.Linear(size, size, bias=False),
    lambda _: nn.Identity(),
]


def _module(seed: int) -> nn.Module:
    """Draw a module. Its initial weights are torch's, seeded by whoever calls."""
    rng = np.random.default_rng(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    size = INPUTS
    layers += [BETWEEN[rng.integers(len(BETWEEN))](size) for _ in range(rng.integers(0, 4))]
    layers.append(nn.Linear(size, CLASSES, bias=bool(rng.integers(2))))
    if rng.random() < 0.2 and len(layers) > 2:
        layers.insert(2, layers[1])  # the same layer twice
    if rng.random() < 0.5:
        learning = [one for one in layers if isinstance(one, nn.Linear)]
        ATTACHED[rng.integers(len(ATTACHED))](learning[rng.integers(len(learning))])
    module = (Halved if rng.random() < 0.2 else nn.Sequential)(*layers)
    if rng.random() < 0.15:
        _hook(module)
    return module


@dataclass(frozen=True)
class Drawn(Task):
    dataset: ClassVar[str] = "none"
    number: int = 0

    def model(self) -> nn.Module:
        return _module(self.number)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("number", range(DRAWN))
def test_drawn_module_is_trained_as_by_pytorch(number: int) -> None:
    rng = np.random.default_rng(number)
    task = Drawn(number)
    torch.manual_seed(number)
    first = build(task)
    start, buffers = initial(first), buffers_of(first)
    train = Shard(
        rng.normal(size=(SAMPLES, 2, INPUTS // 2)).astype(np.float32),
        rng.integers(0, CLASSES, SAMPLES),
    )
    shards = [rng.choice(SAMPLES, size, replace=False) for size in (9, 12, SAMPLES)]
    local = LocalTraining(steps=STEPS, batch_size=5, lr=LR)
    jobs = [
        Job(
            start=start,
            buffers=buffers,
            indices=indices,
            local=local,
            lr=LR,
            steps=STEPS,
            rng=functools.partial(np.random.default_rng, k),
        )
        for k, indices in enumerate(shards)
    ]
    stacked = BatchTrainer(task, train).run(jobs)
    for k, (job, together) in enumerate(zip(jobs, stacked, strict=True)):
        shard = train.subset(job.indices)
        alone = Trainer(task, shard, local).train(start, job.rng(), buffers=buffers)
        end, loss = _plain(task, shard, start, buffers, k)
        np.testing.assert_allclose(alone.end, end, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(together.end, end, rtol=1e-4, atol=1e-5)
        assert alone.loss == pytest.approx(loss, rel=1e-5)
        assert together.loss == pytest.approx(loss, rel=1e-4)


def _plain(task: Task, shard: Shard, start: Any, buffers: Any, seed: int) -> tuple[Any, float]:
    """Training as in PyTorch's tutorial, on the mini-batches that a client draws."""
    module, rng = build(task), np.random.default_rng(seed)
    with torch.no_grad():
        offset = 0
        for _, p in learned(module):
            p.copy_(torch.from_numpy(start[offset : offset + p.numel()]).view(p.shape))
            offset += p.numel()
    if buffers is not NONE and buffers.nbytes:
        load_buffers(module, buffers)
    optimizer = torch.optim.SGD(module.parameters(), LR)
    x, y = shard.tensors()
    batches: list[Any] = []
    torch.manual_seed(int(rng.spawn(1)[0].integers(2**63)))
    while len(batches) < STEPS:
        order = torch.from_numpy(rng.permutation(len(shard)))
        batches += torch.split(order, 5)
    losses = []
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        loss = mean_loss(task, module(x[batch]), y[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return initial(module), float(np.mean(losses))
