"""Quadratic objectives with known minima, so that the limit of a rule can be computed by hand."""

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
    """Quadratic objectives: f_i(w) = ½‖w − c_i‖² for device i, starting at w = 0. K local steps of size
    η give the delta φ(c_i − w) with φ = 1 − (1−η)^K. With uniform importance, the minimum of f is the
    mean of the centers."""

    dataset: ClassVar[None] = None
    has_accuracy: ClassVar[bool] = False

    centers: tuple[tuple[float, ...], ...]
    """The points c_i, one per device, in device order. All points have the same dimension."""

    def __post_init__(self) -> None:
        dimensions = {len(center) for center in self.centers}
        if len(dimensions) != 1 or 0 in dimensions:
            raise ValueError(
                f"centers has {len(self.centers)} points of {sorted(dimensions)} numbers, expected one "
                "point per device, all of the same dimension, such as [[0, 1], [2, 3]]"
            )

    @property
    def l2(self) -> float:
        return 0.0

    def model(self) -> torch.nn.Module:
        """Return a module with one parameter `w`, shape (d,), that maps an input x to w − x."""
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
                f"centers has {len(self.centers)} points, expected {clients}: one per device"
            )

    def shards(self) -> Sequence[Shard]:
        """Return one shard per device: shard i has the one sample x = c_i, shape (1, d)."""
        label = np.zeros(1, np.int64)
        return [Shard(np.array([center], np.float32), label) for center in self.centers]
