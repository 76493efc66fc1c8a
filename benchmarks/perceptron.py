"""A perceptron with one hidden layer on MNIST, as own code, for `benchmarks.virtual`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from agents.config import Count
from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Perceptron(Task):
    """Perceptron: 25,450 parameters with 32 hidden units."""

    dataset: ClassVar[str] = "ylecun/mnist"
    hidden: Count = 32

    def model(self) -> torch.nn.Module:
        from torch import nn

        hidden, scores = nn.Linear(784, self.hidden), nn.Linear(self.hidden, 10)
        return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), scores)
