"""ResNet-18 for small images (He, Zhang, Ren, Sun 2016, arXiv 1512.03385)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from agents.tasks.interface import Task

if TYPE_CHECKING:
    import torch

_GROUPS = 32
"""Number of groups of GroupNorm, as in Wu and He 2018 (arXiv 1803.08494)."""


@dataclass(frozen=True)
class Cifar10ResNet18(Task):
    """CIFAR-10, ResNet-18 with a 3×3 stem without pooling, as is usual for 32×32 pixels; 11,173,962
    parameters. BatchNorm also has buffers: 9,600 running statistics, which are averaged over the
    clients, and 20 counters. GroupNorm has no buffers."""

    paper: ClassVar[str] = "Xu, Zhang, Di, Liu, Alharthi, Cao 2024: FedFa"
    dataset: ClassVar[str] = "uoft-cs/cifar10"
    norm: Literal["batch", "group"] = "batch"
    l2: float = 0.0

    def model(self) -> torch.nn.Module:
        from torch import nn

        return nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1, bias=False),
            self._norm(64),
            nn.ReLU(inplace=True),
            *self._stage(64, 64, stride=1),
            *self._stage(64, 128, stride=2),
            *self._stage(128, 256, stride=2),
            *self._stage(256, 512, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def _norm(self, channels: int) -> torch.nn.Module:
        from torch import nn

        return nn.BatchNorm2d(channels) if self.norm == "batch" else nn.GroupNorm(_GROUPS, channels)

    def _stage(self, before: int, channels: int, stride: int) -> Iterator[torch.nn.Module]:
        """Yield two residual blocks. The first one halves width and height if `stride` is 2."""
        from torch import nn

        class ResidualBlock(nn.Module):
            """The layers relu(x + residual(x))."""

            def __init__(self, residual: nn.Module, shortcut: nn.Module) -> None:
                super().__init__()
                self.residual, self.shortcut = residual, shortcut

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.relu(self.residual(x) + self.shortcut(x))

        for inputs, step in ((before, stride), (channels, 1)):
            residual = nn.Sequential(
                nn.Conv2d(inputs, channels, 3, step, padding=1, bias=False),
                self._norm(channels),
                nn.ReLU(inplace=True),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                self._norm(channels),
            )
            shortcut: nn.Module = nn.Identity()
            if (inputs, step) != (channels, 1):
                convolution = nn.Conv2d(inputs, channels, 1, step, bias=False)
                shortcut = nn.Sequential(convolution, self._norm(channels))
            yield ResidualBlock(residual, shortcut)
