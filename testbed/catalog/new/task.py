"""A task of your own. Its topology is beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from agents.config import Count, NotNegative
from agents.tasks.interface import Task

if TYPE_CHECKING:  # PyTorch takes seconds to import: what only looks at the parameters does without
    import torch


@dataclass(frozen=True)
class MyTask(Task):
    """What this learns. The fields are the parameters that a topology may give."""

    dataset: ClassVar[str] = "digits"  # `testbed tasks` shows those that there are
    # Or your own: a method that returns it, as in
    #   def dataset(self) -> Splits:  # of agents.tasks.interface
    #       return {"train": {"x": x, "y": y}, "test": {"x": ..., "y": ...}}  # NumPy arrays
    # Or neither, where each topology names its own, as in data: {path: mine.parquet} under its task

    hidden: Count = 32  # a whole number from 1 on; agents/config.py has more such types
    l2: NotNegative = 0.0  # weight of the ℓ2 term, which is added to the loss

    def __post_init__(self) -> None:
        """Refuse parameters that do not fit together; the error points at `hidden` in the topology."""
        if self.hidden > 4096:
            raise ValueError(f"hidden is {self.hidden}, expected at most 4096")

    def model(self) -> torch.nn.Module:
        """A new model: x of the dataset, shape (batch, 8, 8), to scores, shape (batch, 10)."""
        from torch import nn

        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10)
        )

    # Without the two below a task has these: cross-entropy, and whether the highest score is right.
    # A third one, `weights(y)`, says how much each sample counts; without it all count the same.

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of each sample, shape (batch,)."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, y, reduction="none")

    def correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Whether each sample is predicted right, shape (batch,)."""
        return outputs.argmax(1) == y
