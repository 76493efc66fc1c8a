"""A task that makes its own data, with a client for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agents.tasks.interface import Splits, Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Circle(Task):
    """Which points of the plane lie in a circle, as 30 sensors have seen them."""

    def dataset(self) -> Splits:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(1500, 2))
        y = np.hypot(x[:, 0], x[:, 1]) < 1
        return {"train": {"x": x, "y": y.astype(int), "client": np.arange(1500) % 30}}

    def model(self) -> torch.nn.Module:
        from torch import nn

        return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
