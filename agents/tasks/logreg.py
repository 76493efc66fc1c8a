"""ℓ2-regularised multinomial logistic regression: f(w) = cross-entropy + (l2/2)·‖w‖², convex."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DigitsLogreg(Task):
    """Logistic regression on the bundled digits: 1,797 images of 8×8, 10 classes."""

    dataset: ClassVar[str] = "digits"
    pixels: ClassVar[int] = 8 * 8
    l2: float = 1e-4
    bias: bool = True

    def model(self) -> torch.nn.Module:
        import torch

        layer = torch.nn.Linear(self.pixels, 10, bias=self.bias)
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)  # convex objective: any start leads to the same minimum
        return torch.nn.Sequential(torch.nn.Flatten(), layer)


@dataclass(frozen=True)
class MnistLogreg(DigitsLogreg):
    """Logistic regression on MNIST: 70,000 images of 28×28, 10 classes.

    `scaling` of the pixels: from 0 to 1 (`unit`), from −1 to 1 (`signed`), or to mean 0 and variance 1
    over all pixels of the training images (`standardised`). Papers often do not say which scaling they
    used.
    """

    dataset: ClassVar[str] = "ylecun/mnist"
    pixels: ClassVar[int] = 28 * 28
    scaling: Literal["unit", "signed", "standardised"] = "unit"

    def model(self) -> torch.nn.Module:
        import torch

        flatten, layer = super().model().children()
        mean, deviation = _SCALINGS[self.scaling]
        scaled = [] if (mean, deviation) == (0, 1) else [_shifted(mean, deviation)]
        return torch.nn.Sequential(flatten, *scaled, layer)


_SCALINGS = {"unit": (0.0, 1.0), "signed": (0.5, 0.5), "standardised": (0.1307, 0.3081)}
"""Mean and deviation of each scaling. A pixel x from 0 to 1 becomes (x − mean) ÷ deviation."""


def _shifted(mean: float, deviation: float) -> torch.nn.Module:
    import torch

    class Shifted(torch.nn.Module):
        """The layer (x − mean) ÷ deviation, without parameters."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - mean) / deviation

    return Shifted()
