"""A client's training data, or the test set, as one safetensors file that the controller writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file


@dataclass(frozen=True, slots=True)
class Shard:
    """n samples. A model's input is x · scale, in float32."""

    x: NDArray[Any]
    """Shape (n, …), uint8 or float32."""
    y: NDArray[np.int64]
    """Labels, shape (n,)."""
    scale: float = 1.0

    def __len__(self) -> int:
        return len(self.y)


def save(shard: Shard, path: Path) -> None:
    x, y = np.ascontiguousarray(shard.x), np.ascontiguousarray(shard.y)
    save_file({"x": x, "y": y}, path, metadata={"scale": repr(shard.scale)})


def load(path: Path) -> Shard:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        return Shard(file.get_tensor("x"), file.get_tensor("y"), float(metadata["scale"]))
