"""Shards, a client's training data or the test set as one file, and the parts of the data on which the
global model is evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """n samples with labels."""

    x: NDArray[Any]
    """Shape (n, …). The model's input is x · scale in float32 for uint8 or float32, and x in int64 for
    signed integers (tokens)."""
    y: NDArray[Any]
    """Shape (n,) or (n, …). Classes and tokens are int64; real numbers are float32."""
    scale: float = 1.0
    """Factor from x to the model's input."""

    def __len__(self) -> int:
        return len(self.y)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Model's inputs, shape (n, …), float32 multiplied by `scale`, or int64 for tokens; and
        labels."""
        import torch

        return model_inputs(torch.from_numpy(self.x), self.scale), torch.from_numpy(self.y)

    def subset(self, indices: NDArray[np.int64]) -> Shard:
        return Shard(self.x[indices], self.y[indices], self.scale)


def model_inputs(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Copy of samples `x`, shape (n, …), as the model's input: signed integers as int64, all else as
    float32 multiplied by `scale`."""
    import torch

    if x.dtype.is_signed and not x.dtype.is_floating_point:
        return x.to(torch.int64, copy=True)
    return x.to(torch.float32, copy=True).mul_(scale)


def save(shard: Shard, path: Path) -> None:
    x, y = np.ascontiguousarray(shard.x), np.ascontiguousarray(shard.y)
    save_file({"x": x, "y": y}, path, metadata={"scale": repr(shard.scale)})


def load(path: Path) -> Shard:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        return Shard(file.get_tensor("x"), file.get_tensor("y"), float(metadata["scale"]))


@dataclass(frozen=True, slots=True)
class Part:
    """Fields as in `events.EvaluatedPart`."""

    part: str
    name: str
    samples: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts on which the model is evaluated, in addition to the whole test set."""

    classes: bool = False
    device_set: Shard | None = None
    """Samples of the devices, one device after the other; None if devices are not parts."""
    device_samples: Mapping[str, int] = field(default_factory=dict)
    """Samples of each device in `device_set`, in the same order."""


NO_PARTS = Parts()
