"""A small network of linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MnistMlp(Task):
    """MNIST: one hidden layer of 64 with ReLU; 50,890 parameters. Each image is shifted and scaled to
    mean 0 and variance 1, so that few steps suffice."""

    dataset: ClassVar[str] = "ylecun/mnist"
    l2: float = 0.0

    def model(self) -> torch.nn.Module:
        from torch import nn

        return nn.Sequential(
            nn.LayerNorm((28, 28), elementwise_affine=False),
            nn.Flatten(),
            nn.Linear(28 * 28, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
