"""ℓ2-regularised multinomial logistic regression: f(w) = cross-entropy + (l2/2)·‖w‖², convex."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DigitsLogreg(Task):
    """Logistic regression on scikit-learn's bundled digits: 1,797 images of 8×8, 10 classes."""

    dataset: ClassVar[str] = "digits"
    pixels: ClassVar[int] = 8 * 8
    l2: float = 1e-4
    bias: bool = True

    def model(self) -> torch.nn.Module:
        import torch

        layer = torch.nn.Linear(self.pixels, 10, bias=self.bias)
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)  # convex: every start is as good, and this one is no one's
        return torch.nn.Sequential(torch.nn.Flatten(), layer)


@dataclass(frozen=True)
class MnistLogreg(DigitsLogreg):
    """Logistic regression on MNIST: 70,000 images of 28×28, 10 classes."""

    dataset: ClassVar[str] = "ylecun/mnist"
    pixels: ClassVar[int] = 28 * 28
