"""The convolutional networks of DeFedAvg's experiments (Wang, Li, Jin, Zhang)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Cifar10CnnDefedavg(Task):
    """CIFAR-10, DeFedAvg's model: two 5×5 convolutions (32, 64 channels), each with 2×2 max pooling,
    then linear layers from 1600 to 512 and 10 outputs; 878,538 parameters."""

    paper: ClassVar[str] = "Wang, Li, Jin, Zhang: DeFedAvg"
    dataset: ClassVar[str] = "uoft-cs/cifar10"
    channels: ClassVar[int] = 3
    features: ClassVar[int] = 64 * 5 * 5
    l2: float = 0.0

    def model(self) -> torch.nn.Module:
        from torch import nn

        return nn.Sequential(
            nn.Unflatten(1, (1, 28)) if self.channels == 1 else nn.Identity(),
            nn.Conv2d(self.channels, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(self.features, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )


@dataclass(frozen=True)
class FashionMnistCnn(Cifar10CnnDefedavg):
    """Fashion-MNIST, DeFedAvg's model: two 5×5 convolutions (32, 64 channels), each with 2×2 max
    pooling, then linear layers from 1024 to 512 and 10 outputs; 582,026 parameters. The paper has 1600
    instead of 1024, but 1600 is the size for CIFAR-10."""

    dataset: ClassVar[str] = "zalando-datasets/fashion_mnist"
    channels: ClassVar[int] = 1
    features: ClassVar[int] = 64 * 4 * 4
