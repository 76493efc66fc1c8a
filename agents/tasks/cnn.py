"""Small convolutional networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MnistCnn(Task):
    """MNIST: two 5×5 convolutions (16, 32 channels), each with 2×2 max pooling, and a linear layer;
    28,938 parameters."""

    dataset: ClassVar[str] = "ylecun/mnist"
    l2: float = 0.0

    def model(self) -> torch.nn.Module:
        from torch import nn

        return nn.Sequential(
            nn.Unflatten(1, (1, 28)),
            nn.Conv2d(1, 16, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 10),
        )


@dataclass(frozen=True)
class Cifar10Cnn(Task):
    """CIFAR-10, LeNet-5 with ReLU and max pooling: two 5×5 convolutions (6, 16 channels), each with 2×2
    pooling, and linear layers of 120, 84 and 10; 62,006 parameters."""

    dataset: ClassVar[str] = "uoft-cs/cifar10"
    l2: float = 0.0

    def model(self) -> torch.nn.Module:
        from torch import nn

        return nn.Sequential(
            nn.Conv2d(3, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )
