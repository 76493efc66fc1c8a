"""Quadratics with known minima: what a rule converges to can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from agents.shards import Shard
from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Quadratic(Task):
    """f_i(w) = ½‖w − c_i‖² for device i, from w = 0: K local steps of size η make the delta
    φ(c_i − w) with φ = 1 − (1−η)^K. Of uniform importance, f is least at the mean of the centers."""

    dataset: ClassVar[None] = None
    has_accuracy: ClassVar[bool] = False

    centers: tuple[tuple[float, ...], ...]
    """c_i, one per device in their order, all of one dimension."""

    def __post_init__(self) -> None:
        dimensions = {len(center) for center in self.centers}
        if len(dimensions) != 1 or 0 in dimensions:
            raise ValueError(
                f"centers is {len(self.centers)} points of {sorted(dimensions)} numbers, expected one "
                "per device, all of one dimension, such as [[0, 1], [2, 3]]"
            )

    @property
    def l2(self) -> float:
        return 0.0

    def model(self) -> torch.nn.Module:
        """One parameter `w`, shape (d,); an input x becomes w − x."""
        import torch

        class Difference(torch.nn.Module):
            def __init__(self, dimension: int) -> None:
                super().__init__()
                self.w = torch.nn.Parameter(torch.zeros(dimension))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.w - x

        return Difference(len(self.centers[0]))

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return outputs.square().sum(1) / 2

    def correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        return None

    def check(self, clients: int) -> None:
        if clients != len(self.centers):
            raise ValueError(
                f"centers is {len(self.centers)} points, expected one for each of the {clients} devices"
            )

    def shards(self) -> Sequence[Shard]:
        """Shard i has the one sample x = c_i, shape (1, d)."""
        label = np.zeros(1, np.int64)
        return [Shard(np.array([center], np.float32), label) for center in self.centers]
