"""Your own task. A topology that uses it is in the YAML file with the same name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from agents.config import Count, NotNegative
from agents.tasks.interface import Task

if TYPE_CHECKING:  # PyTorch takes seconds to import, and is not needed to check the parameters
    import torch


@dataclass(frozen=True)
class MyTask(Task):
    """Description of the task. The fields are parameters that a topology can set."""

    dataset: ClassVar[str] = "digits"  # `testbed tasks` shows the names of datasets
    # Or a method that returns your own data:
    #   def dataset(self) -> Splits:  # from agents.tasks.interface
    #       return {"train": {"x": x, "y": y}, "test": {"x": ..., "y": ...}}  # NumPy arrays
    # Or neither, if each topology names its data, as in data: {path: mine.parquet} in its task

    hidden: Count = 32  # an integer of at least 1; agents/config.py has more such types
    l2: NotNegative = 0.0  # weight of the ℓ2 term that is added to the loss

    def __post_init__(self) -> None:
        """Raise an error if parameters do not fit together. The error will point at `hidden` in the
        topology."""
        if self.hidden > 4096:
            raise ValueError(f"hidden is {self.hidden}, expected at most 4096")

    def model(self) -> torch.nn.Module:
        """Return a new model that maps x, shape (batch, 8, 8), to scores, shape (batch, 10)."""
        from torch import nn

        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10)
        )

    # The two methods below can be left out; these are the defaults: cross-entropy, and whether the
    # highest score is right. A method `weights(y)` weights the samples; by default all weigh the same.

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample, shape (batch,)."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, y, reduction="none")

    def correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return whether each sample is predicted correctly, shape (batch,)."""
        return outputs.argmax(1) == y
