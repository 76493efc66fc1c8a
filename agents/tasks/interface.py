"""What a task is: model, data, loss and metric. The dataclass imports no torch; its methods do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from agents.shards import Shard

Splits = Mapping[str, Mapping[str, Any]]
"""A dataset: arrays `x`, `y` and `client` of its splits `train`, `test` and `validation`, with a row for
each sample. All but x of train may be missing (docs/guide/data.md)."""


class Task(Protocol):
    """The parameters of a task: a frozen dataclass whose fields are what a topology may set.

    The local objective is the mean of `loss` over the client's shard, by mini-batches, in which samples
    count by their `weights`, plus (l2/2)·‖w‖² over the whole flat model.
    Defaults for all that a task does not override: cross-entropy and accuracy of a classifier.
    """

    dataset: ClassVar[str | Callable[[Any], Splits] | None] = ""
    """Name in `testbed.data.datasets.DATASETS`, or a method that returns the data, the same each time;
    None where `shards` brings them, device by device; empty where each topology names its own."""
    has_accuracy: ClassVar[bool] = True
    """Whether `correct` means something."""
    fits: ClassVar[bool] = False
    """Whether it trains by its own `fit`, and not by the gradient of `loss`."""
    has_perplexity: ClassVar[bool] = False
    """Whether `loss` is the cross-entropy of the next token: then exp(loss) is the perplexity."""

    @property
    def l2(self) -> float:
        """Weight of the ℓ2 term."""
        return 0.0

    def model(self) -> torch.nn.Module:
        """A fresh module: it maps inputs of the dataset, scaled as in its shards, to outputs.

        The first dimension of both is the batch. Parameters that are learned are float32; frozen ones
        (`requires_grad=False`) do not travel, and must be the same each time. Buffers, such as
        BatchNorm's running statistics, travel and are averaged (docs/concepts/models.md). Its initial
        weights may be drawn from torch's global generator; the caller seeds it.
        """
        ...

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Loss of every sample, shape (batch,)."""
        import torch

        return torch.nn.functional.cross_entropy(outputs, y, reduction="none")

    def weights(self, y: torch.Tensor) -> torch.Tensor | None:
        """Weight of every sample in the mean of the losses, shape (batch,); None: all count the same.

        The mean over a mini-batch, or the test set, is Σ weight · loss ÷ Σ weight, with `loss` without
        them: that of torch's losses with `weight` and the reduction `mean`.
        """
        return None

    def correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """Whether each sample is predicted right, shape (batch,); None where that means nothing."""
        return outputs.argmax(1) == y

    def fit(self, module: torch.nn.Module, shard: Shard, lr: float) -> float:
        """Train `module`, in place, on a client's shard, where `fits`; the mean loss, NaN if not known.

        It counts as one step, and is not cut short. Random numbers of torch, NumPy and Python follow
        from the topology's seed.
        """
        raise LookupError(f"{type(self).__name__} learns by the gradient of its loss")

    def check(self, clients: int) -> None:
        """Raise ValueError where these parameters cannot work with `clients` clients."""
        return  # a body: what has none is abstract to mypy

    def shards(self) -> Sequence[Shard]:
        """A shard per client, in device order, for a task without dataset; they are its test set too."""
        raise LookupError(f"{type(self).__name__} learns from the dataset {self.dataset}")

    def shards_for(self, clients: int) -> Sequence[Shard]:
        """`shards`, for a task that makes them for any number of clients."""
        return self.shards()


def mean_loss(task: Task, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of a mini-batch, without the ℓ2 term."""
    losses, weights = task.loss(outputs, y), task.weights(y)
    return losses.mean() if weights is None else (losses * weights).sum() / weights.sum()


def not_taken(x: torch.Tensor, reason: str) -> str:
    """That a model does not take the inputs `x`, for a sentence that begins with the model."""
    shape = "×".join(map(str, x.shape[1:])) or "one number"
    dtype = str(x.dtype).removeprefix("torch.")
    return f"does not take inputs of shape {shape}, {dtype}: {reason}"


def no_classes(y: NDArray[Any], outputs: Sequence[int]) -> str:
    """Why labels are no classes for the cross-entropy of outputs of this shape; empty where they are."""
    if y.dtype.kind != "i":
        return (
            f"its loss is the cross-entropy, which takes classes, and these are {y.dtype}. Name a "
            "column of classes, or take a task with a loss of its own"
        )
    classes = outputs[1]
    for label in (int(y.min()), int(y.max())):
        if not 0 <= label < classes:
            found = f"found class {label}, and the model has {classes} outputs"
            return f"{found}, for classes 0 to {classes - 1}"
    return ""
