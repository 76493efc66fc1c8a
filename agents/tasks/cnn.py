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


@dataclass(frozen=True)
class Cifar10CnnSmall(Task):
    """CIFAR-10, a network for many cheap runs: two 3×3 convolutions of stride 2 (8, 16 channels), and a
    linear layer; 11,642 parameters. Each image is shifted and scaled to mean 0 and variance 1, so that
    few steps suffice."""

    dataset: ClassVar[str] = "uoft-cs/cifar10"
    l2: float = 0.0

    def model(self) -> torch.nn.Module:
        from torch import nn

        return nn.Sequential(
            nn.LayerNorm((3, 32, 32), elementwise_affine=False),
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 8 * 8, 10),
        )
