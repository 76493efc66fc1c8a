"""What a task is: model, dataset, loss and metric. The dataclass imports no torch; its methods do."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch


class Task(Protocol):
    """The parameters of a task: a frozen dataclass whose fields are what a topology may set.

    The loss is cross-entropy plus (l2/2)·‖w‖² over the whole flat model; the metric is accuracy.
    """

    dataset: ClassVar[str]
    """Name in `testbed.data.DATASETS`."""

    @property
    def l2(self) -> float: ...

    def model(self) -> torch.nn.Module:
        """A fresh module: inputs as the dataset has them, scaled to [0, 1], to logits (batch, classes).

        Its initial weights may be drawn from torch's global generator; the caller seeds it.
        """
