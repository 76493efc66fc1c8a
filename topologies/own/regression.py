"""Task of regression.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from agents.tasks.interface import Splits, Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Friedman(Task):
    """A function of ten inputs, of which five have an influence (Friedman 1991, eq. 56), with noise."""

    has_accuracy: ClassVar[bool] = False

    def dataset(self) -> Splits:
        rng = np.random.default_rng(0)
        x = rng.uniform(size=(1000, 10))
        y = (
            10 * np.sin(np.pi * x[:, 0] * x[:, 1])
            + 20 * (x[:, 2] - 0.5) ** 2
            + 10 * x[:, 3]
            + 5 * x[:, 4]
        )
        return {"train": {"x": 2 * x - 1, "y": (y + rng.normal(size=1000)) / 10}}

    def model(self) -> torch.nn.Module:
        from torch import nn

        return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs - y).square()  # of each sample: both have shape (batch,)
