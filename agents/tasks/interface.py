"""The interface of learning tasks: model, data, loss and metric. Only the methods import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from agents.models.vectors import Vector
    from agents.shards import Shard

Splits = Mapping[str, Mapping[str, Any]]
"""A dataset: arrays `x`, `y` and `client` for each of the splits `train`, `test` and `validation`,
with one row per sample. Every array except `x` of `train` may be missing (docs/guide/data.md)."""


@dataclass(frozen=True, slots=True)
class FitClient:
    """The client whose shard a task's own `fit` trains on."""

    name: str
    """Name of the device."""
    index: int
    """Number of the device in device order, from 0."""
    memory: dict[str, Vector] = field(default_factory=dict)
    """Vectors that the client remembers from one training to the next: name -> float32 vector, shape
    (n,). `fit` may change this dict. The dict is kept over crashes and when the run is resumed. If an
    update is lost, rejected or not used by the rule, the next training begins with the dict from before
    that update."""


class Task(Protocol):
    """The parameters of a task: a frozen dataclass whose fields are the keys that a topology may set.

    The local objective is the mean of `loss` over mini-batches of the client's shard, weighted by
    `weights`, plus (l2/2)·‖w‖² over the whole flat model. The defaults are those of a classifier:
    cross-entropy and accuracy.
    """

    dataset: ClassVar[str | Callable[[Any], Splits] | None] = ""
    """Name in `testbed.data.datasets.DATASETS`, or a method that returns the same data at each call.
    None if `shards` makes the data of each device. Empty if each topology names its dataset."""
    has_accuracy: ClassVar[bool] = True
    """Whether the task has an accuracy, which is computed from `correct`. A task without accuracy need
    not define `correct`."""
    fits: ClassVar[bool] = False
    """Whether the task trains with its own `fit`, and not with the gradient of `loss`."""
    needs_whole_set: ClassVar[bool] = False
    """Whether the outputs for a sample depend on the other samples of its batch. If so, a set of samples
    is evaluated in one batch."""
    has_perplexity: ClassVar[bool] = False
    """Whether `loss` is the cross-entropy of the next token, so that exp(loss) is the perplexity."""

    @property
    def l2(self) -> float:
        """Weight of the ℓ2 term."""
        return 0.0

    def model(self) -> torch.nn.Module:
        """Return a new module that maps the dataset's inputs, scaled as in the shards, to outputs.

        The first dimension of inputs and outputs is the batch. Learned parameters are float32. Frozen
        parameters (`requires_grad=False`) are not sent, so they must be the same at each call. Buffers,
        such as BatchNorm's running statistics, are sent and averaged (docs/concepts/models.md). Initial
        weights may be drawn from torch's global generator, which the caller seeds.
        """
        ...

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample, shape (batch,)."""
        import torch

        return torch.nn.functional.cross_entropy(outputs, y, reduction="none")

    def weights(self, y: torch.Tensor) -> torch.Tensor | None:
        """Return the weight of each sample in the mean of the losses, shape (batch,); None if all
        weights are equal.

        The mean over a mini-batch, or the test set, is Σ weight · loss ÷ Σ weight, as in torch's losses
        with `weight` and the reduction `mean`. No weight is below 0. `loss` must not include the
        weights.
        """
        return None

    def correct(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """Return whether each sample is predicted correctly, shape (batch,); None if the task has no
        accuracy."""
        return outputs.argmax(1) == y

    def fit(self, module: torch.nn.Module, shard: Shard, lr: float) -> float:
        """Train `module` in place on a client's shard. Return the mean loss; NaN if it is unknown. Only
        tasks with `fits` define this method. `shard.x` has the type of the data, such as uint8 for
        images. `shard.tensors()` returns inputs and labels as tensors for `module`.

        With a fourth parameter, `fit(self, module, shard, lr, client)`, the method also gets a
        `FitClient`.

        One call counts as one local step and cannot be interrupted. The random generators of torch,
        NumPy and Python are seeded from the topology's seed.
        """
        raise LookupError(f"{type(self).__name__} has no `fit`: it trains with the gradient of its loss")

    def check(self, clients: int) -> None:
        """Raise ValueError if these parameters cannot work with `clients` clients."""
        return  # mypy takes a method without a body as abstract

    def shards(self) -> Sequence[Shard]:
        """Return one shard per client, in device order. Only tasks without dataset define this method.
        All shards together are also the test set."""
        raise LookupError(
            f"{type(self).__name__} makes no shards: it learns from the dataset {self.dataset}"
        )

    def shards_for(self, clients: int) -> Sequence[Shard]:
        """Return one shard for each of `clients` clients. A task that works with any number of clients
        overrides this method."""
        return self.shards()


def calls_correct(task: Task) -> bool:
    """Whether evaluations call `correct`. True if the task has an accuracy or defines the method."""
    return task.has_accuracy or type(task).correct is not Task.correct


def mean_loss(task: Task, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of a mini-batch, without the ℓ2 term."""
    losses, weights = task.loss(outputs, y), task.weights(y)
    return losses.mean() if weights is None else weighted_mean(losses, weights)


def weighted_mean(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return Σ weight · loss ÷ Σ weight. If all samples weigh 0, the mean and its gradient are 0: such a
    mini-batch changes nothing."""
    total = weights.sum()
    return (losses * weights).sum() / total.where(weights.any(), total.new_ones(()))


def unfit_inputs(x: torch.Tensor, reason: str) -> str:
    """Return the predicate of an error message about a model that does not accept the inputs `x`: `does
    not accept inputs of shape …`."""
    shape = "×".join(map(str, x.shape[1:])) or "one number"
    dtype = str(x.dtype).removeprefix("torch.")
    return f"does not accept inputs of shape {shape}, {dtype}: {reason}"


def unfit_classes(y: NDArray[Any], outputs: Sequence[int]) -> str:
    """Return why labels `y` cannot be used as classes for the cross-entropy of outputs of shape
    `outputs`. The text is empty if they can."""
    if y.dtype.kind != "i":
        return (
            f"its loss is the cross-entropy, which needs integer classes, but the labels are {y.dtype}: "
            "name a column of classes, or use a task with its own loss"
        )
    if y.ndim == 1 and len(outputs) > 2:
        shape = "×".join(map(str, outputs[1:]))
        return (
            f"each sample has one class as its label, but outputs of shape {shape}: name a column with "
            "a list of labels per sample, such as the next tokens"
        )
    classes = outputs[1]
    for label in (int(y.min()), int(y.max())):
        if not 0 <= label < classes:
            found = f"found class {label}, but the model has {classes} outputs"
            counted = "; classes are counted from 0: subtract 1" if int(y.min()) == 1 else ""
            return f"{found}, for classes 0 to {classes - 1}{counted}"
    return ""
