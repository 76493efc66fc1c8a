"""The CIFAR-10 network of FedAvg's experiments, also used by FedFix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Cifar10CnnMcmahan(Task):
    """CIFAR-10, the model of McMahan et al. 2017 (arXiv 1602.05629): two 5×5 convolutions (64 channels
    each) with 3×3 max pooling of stride 2, and linear layers of 384, 192 and 10; 1,068,298 parameters
    ("about 10^6" in the paper). The input is the middle 24×24 pixels. The model is based on a TensorFlow
    tutorial. The tutorial's random crops, flips and local response normalisation are omitted here."""

    paper: ClassVar[str] = "Fraboni, Vidal, Kameni, Lorenzi 2023: FedFix"
    dataset: ClassVar[str] = "uoft-cs/cifar10"
    l2: float = 0.0

    def model(self) -> torch.nn.Module:
        from torch import nn

        return nn.Sequential(
            nn.ZeroPad2d(-4),
            nn.Conv2d(3, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
            nn.Conv2d(64, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
            nn.Flatten(),
            nn.Linear(64 * 6 * 6, 384),
            nn.ReLU(),
            nn.Linear(384, 192),
            nn.ReLU(),
            nn.Linear(192, 10),
        )
