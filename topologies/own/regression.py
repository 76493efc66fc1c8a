"""Task of regression.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from agents.tasks.interface import Splits, Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Diabetes(Task):
    """Progress of a disease after a year, from ten measurements of a patient."""

    has_accuracy: ClassVar[bool] = False

    def dataset(self) -> Splits:
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True)  # float64; the model gets float32
        return {"train": {"x": 20 * x, "y": y / 100}}

    def model(self) -> torch.nn.Module:
        from torch import nn

        return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs - y).square()  # of each sample: both have shape (batch,)
