"""Loss and gradient for a stack of models, each with its own mini-batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.conv import _ConvNd

from agents.config import FROM_TASK, InitialModel
from agents.models import flat
from agents.models.flat import FlatModule, build, stored_buffers, vector_parts
from agents.models.vectors import Vector
from agents.shards import Shard, model_inputs
from agents.tasks.interface import Task, mean_loss
from agents.tasks.quadratic import Quadratic
from testbed.virtual.layers import Layers

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]

_CACHED_MODELS = 1 << 20
_CACHED_SAMPLES = 640 << 10
"""Maximum bytes of models with gradients, and of samples, that are processed together: they fit into a
core's cache, and make numpy's overhead small."""
_STACK = 8 << 20
"""Maximum bytes of all models in a stack for vmap."""
_STACKED, _FEW = 64, 12
"""Maximum number of models in a stack for vmap, and minimum number from which vmap is faster than one
after the other (on two cores). They are the same on every host, and so are the results."""
_TRIED = 5
"""Size of the two mini-batches on which a fast computation is compared with autograd."""


class Scratch:
    """Memory that is used again: allocating it each time can take as long as the computation."""

    def __init__(self, dtype: DTypeLike) -> None:
        self._memory: NDArray[Any] = np.empty(0, dtype)

    def array(self, *shape: int) -> NDArray[Any]:
        """Arbitrary content, valid until the next call."""
        size = math.prod(shape)
        if self._memory.size < size:
            self._memory = np.empty(size, self._memory.dtype)
        return self._memory[:size].reshape(shape)


class Gradient(Protocol):
    def __call__(self, step: int, w: Any, out: Any) -> Any:
        """Return the mean loss of each model `w[k]` on its mini-batch of `step`, shape (jobs,). Write
        the gradient of each loss to `out[k]`.

        `w` and `out` have shape (jobs, d) and contiguous rows, and are where the objective computes. If
        there are fewer jobs than mini-batches, the jobs use the first ones.
        """
        ...


class Objective(Protocol):
    """Two threads must not use the same objective together: it may reuse memory."""

    partial: bool
    """True if a loss since the last call of `gradient_on` did not depend on all parameters."""

    def gradient_on(self, rows: Indices, sizes: Indices) -> Gradient:
        """Job k at step t has the samples at the first `sizes[t, k]` indices in `rows[t, k]`. `sizes`
        has shape (steps, jobs), `rows` (steps, jobs, b)."""
        ...

    def stack_size(self, batch_size: int) -> int:
        """Number of jobs to train together for speed. `batch_size`: samples per mini-batch."""
        ...


class StackMemory(Protocol):
    """Models of a stack and their gradients, in arrays or tensors."""

    def models(self, starts: Sequence[Vector]) -> tuple[Any, Any]:
        """Initial models, shape (jobs, d), and memory for their gradients, both valid until the next
        call. `gradient_on` is called before."""
        ...

    def place(self, array: NDArray[Any]) -> Any:
        """Copy of `array` in this memory, or `array` if it is in it."""
        ...

    def fetch(self, placed: Any) -> Floats:
        """Array of the host."""
        ...

    def squares(self, w: Any) -> Any:
        """Squared norms of models, shape (jobs,)."""
        ...


class HostStackMemory:
    def __init__(self) -> None:
        self._models, self._gradients = Scratch(np.float32), Scratch(np.float32)

    def models(self, starts: Sequence[Vector]) -> tuple[Floats, Floats]:
        shape = len(starts), starts[0].size
        w = self._models.array(*shape)
        np.concatenate(starts, out=w.reshape(-1))
        return w, self._gradients.array(*shape)

    def place(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def fetch(self, placed: Floats) -> Floats:
        return placed

    def squares(self, w: Floats) -> Floats:
        found: Floats = np.vecdot(w, w)
        return found


def objective(task: Task, train: Shard, start: InitialModel = FROM_TASK) -> Objective:
    """The fastest objective on a CPU that computes what autograd computes, to rounding, on some samples
    of `train`."""
    with flat.unchanged_generators():
        module = build(task, start)
    exact = AnyModule(task, train, module)
    quick = _closed_form(task, train, module)
    if quick is not None and exact.equals(quick):
        return quick
    exact.accelerate()
    return exact


def _closed_form(task: Task, train: Shard, module: nn.Module) -> Objective | None:
    """Formula of a task that looks like a known one. Whether it is one, only a comparison says."""
    if type(task) is Quadratic:
        return Squares(train)
    plain = (type(task).loss, type(task).weights) == (Task.loss, Task.weights)
    if plain and type(module) is nn.Sequential and is_plain(module):
        match list(module):
            case [nn.Flatten(start_dim=1, end_dim=-1), nn.Linear() as layer]:
                with suppress(ValueError):  # samples of another size, which autograd will refuse
                    return Softmax(train, layer)
    return None


class Softmax:
    """Multinomial logistic regression. With p = softmax(W x + b), the gradient of the cross-entropy is
    (p − onehot(y)) xᵀ for W and p − onehot(y) for b.

    The gradient is computed in numpy on one thread. At this size, torch's operators cost more than their
    arithmetic, and threads spend more time waiting for each other than they save.
    """

    partial = False

    def __init__(self, train: Shard, layer: nn.Linear) -> None:
        self._x = train.x.reshape(len(train), layer.in_features)
        self._y, self._scale = train.y, np.float32(train.scale)
        self._shape, self._bias = (layer.out_features, layer.in_features), layer.bias is not None
        self._pixels, self._floats = Scratch(self._x.dtype), Scratch(np.float32)

    def stack_size(self, batch_size: int) -> int:
        classes, inputs = self._shape
        return max(1, _CACHED_MODELS // (8 * classes * (inputs + 1)))

    def gather_size(self, width: int) -> int:
        """Number of jobs whose mini-batches, of `width` samples, are gathered together."""
        return max(1, _CACHED_SAMPLES // (width * self._shape[1] * (4 + self._x.itemsize)))

    def gradient_on(self, rows: Indices, sizes: Indices) -> Gradient:
        _, jobs, width = rows.shape
        classes, block = self._shape[0], self.gather_size(width)
        # Index of the probability of a sample's class in the flattened probabilities of a block.
        own = self._y.take(rows) * width
        own += (np.arange(jobs) % block * classes * width)[:, None] + np.arange(width)
        weights = _weights(sizes, width)
        losses = np.empty(jobs, np.float32)

        def gradient(step: int, w: Floats, out: Floats) -> Floats:
            for first in range(0, len(w), block):
                part = slice(first, min(first + block, len(w)))
                losses[part] = self._gradient(
                    w[part], rows[step, part], own[step, part], weights[step, part], out[part]
                )
            return losses[: len(w)]

        return gradient

    def _gradient(self, w: Floats, rows: Indices, own: Indices, weights: Floats, out: Floats) -> Floats:
        classes, inputs = self._shape
        cut, matrices = classes * inputs, (len(w), classes, inputs)
        x = self._gather(rows)
        # Classes before samples: sums over classes then add whole rows.
        p: Floats = np.matmul(w[:, :cut].reshape(matrices), x.transpose(0, 2, 1))
        p *= self._scale
        if self._bias:
            p += w[:, cut:, None]
        p -= p.max(1)[:, None]
        flat = p.reshape(-1)
        loss = -flat.take(own)
        np.exp(p, out=p)
        total = p.sum(1)
        loss += np.log(total)
        p *= (weights / total)[:, None]
        flat[own] -= weights
        if self._bias:
            p.sum(2, out=out[:, cut:])
        p *= self._scale
        np.matmul(p, x, out=out[:, :cut].reshape(matrices))
        losses: Floats = np.vecdot(loss, weights)
        return losses

    def _gather(self, rows: Indices) -> Floats:
        """Unscaled samples, shape (jobs, b, inputs), valid until the next call."""
        inputs = self._shape[1]
        pixels = self._pixels.array(rows.size, inputs)
        self._x.take(rows.reshape(-1), 0, out=pixels, mode="clip")  # other modes use a buffer
        x: Floats = self._floats.array(*rows.shape, inputs)
        np.copyto(x, pixels.reshape(x.shape))
        return x


class Squares:
    """Quadratic loss ½‖w − x‖², whose gradient is w − x."""

    partial = False

    def __init__(self, train: Shard) -> None:
        self._x = train.x.astype(np.float32) * np.float32(train.scale)

    def stack_size(self, batch_size: int) -> int:
        return max(1, _CACHED_SAMPLES // (4 * batch_size * int(self._x.shape[1])))

    def gradient_on(self, rows: Indices, sizes: Indices) -> Gradient:
        weights = _weights(sizes, rows.shape[2])

        def gradient(step: int, w: Floats, out: Floats) -> Floats:
            share = weights[step, : len(w)]
            differences = w[:, None, :] - self._x[rows[step, : len(w)]]
            np.einsum("kbd,kb->kd", differences, share, out=out)
            losses: Floats = np.einsum("kbd,kbd,kb->k", differences, differences, share) / 2
            return losses

        return gradient


class AnyModule:
    """Any torch module: by autograd, one model after the other, until `accelerate` has found something
    faster with the same results."""

    def __init__(self, task: Task, train: Shard, module: nn.Module) -> None:
        self._task = task
        self._flat = FlatModule(module)
        self._x, self._y = torch.from_numpy(train.x), torch.from_numpy(train.y)
        self._scale = train.scale
        self._parts = vector_parts(module)
        self.partial = self._always_partial = False
        self._each = vmap(grad_and_value(self._mean_loss))
        self.draws = False
        """True if a step draws random numbers, as dropout does."""
        self.refusal: str | None = None
        """Why vmap cannot be used; None if it can, or if stacking would not be faster."""
        self.remark: str | None = None
        """Sentence for the user."""
        self._layers: Layers | None = None
        """Replaces autograd for single models."""
        self._stacked = 1
        """Maximum number of models in a stack."""
        self._trial: _Trial | None = None
        """Results of autograd; None if it raises an error, as the first training then will."""
        with flat.unchanged_generators(), suppress(Exception):
            self._trial = self._try_out()

    def _try_out(self) -> _Trial:
        """Differentiate two models by autograd, on different samples. Set `partial` and `draws`."""
        rng, samples = np.random.default_rng(0), len(self._y)
        rows = [rng.choice(samples, min(_TRIED, samples), replace=False) for _ in range(2)]
        first = self._flat.w.numpy().copy()
        # Far from the first: a model may begin at 0, where many functions have the same gradient.
        noise = rng.standard_normal(first.size, np.float32)
        second = first + noise * np.float32(0.1 * math.sqrt(np.square(first).mean()) + 0.01)
        w = np.stack([first, second])
        before = flat.generator_states()
        trial = _Trial(w, np.stack(rows), np.empty(2, np.float32), np.empty_like(w))
        for k in range(2):
            trial.losses[k] = self._one(w[k], trial.rows[k], trial.gradients[k])
        self._always_partial = self.partial
        self.draws = flat.generator_states() != before
        return trial

    @property
    def trial_models(self) -> Floats:
        """Models on which other computations are compared with autograd, shape (2, d)."""
        return np.stack([self._flat.w.numpy()] * 2) if self._trial is None else self._trial.w

    def equals(self, other: Objective) -> bool:
        """Whether `other` computes the losses and gradients of autograd, to rounding."""
        if (trial := self._trial) is None or self.draws or self._always_partial:
            return False
        sizes = np.full((1, 2), trial.rows.shape[1])
        found = np.empty_like(trial.gradients)
        try:
            losses = other.gradient_on(trial.rows[None], sizes)(0, trial.w.copy(), found)
        except Exception:  # noqa: BLE001  # labels or samples of an unusual kind
            return False
        return trial.equals(losses, found)

    def accelerate(self) -> None:
        """Use `Layers` and vmap where the results are the same; set `remark` and `refusal` where they
        are not."""
        if (trial := self._trial) is None:
            return
        with flat.unchanged_generators():
            if not self.draws and self._flat.w.is_cpu:
                self._try_layers(trial)
            self._try_stacks(trial)

    def _try_stacks(self, trial: _Trial) -> None:
        has_buffers = bool(stored_buffers(self._flat.module))  # such a model is never stacked
        most = min(_STACKED, _STACK // trial.w[0].nbytes)
        if has_buffers or most < _FEW or not _stacks_faster(self._flat.module):
            return
        if has_repeated_layer(self._flat.module):
            self.refusal = REPEATED
            return
        found = np.empty_like(trial.gradients)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # on operations that vmap does one by one, and slowly
                losses = self._many(trial.w, trial.rows, found)
        except Exception as error:  # noqa: BLE001  # vmap may raise anything on the user's code
            self.refusal = str(error).partition("\n")[0]
        else:
            if trial.equals(losses, found):
                self._stacked = most
            else:
                self.refusal = "the gradients differ"

    def _try_layers(self, trial: _Trial) -> None:
        module = self._flat.module
        self._layers = Layers.from_module(self._task, module) if is_plain(module) else None
        if self._layers is None:
            return
        found, losses = np.empty_like(trial.gradients), np.empty_like(trial.losses)
        try:
            for k in range(2):
                losses[k] = self._one(trial.w[k], trial.rows[k], found[k])
        except Exception:  # noqa: BLE001  # samples of an unusual shape, or another PyTorch's kernels
            self._layers = None
            return
        if not trial.equals(losses, found):
            self._layers = None
            self.remark = (
                "Clients are trained by autograd, because the layers of the model do not say all that "
                "it computes (shared parameters)"
            )

    def stack_size(self, batch_size: int) -> int:
        return self._stacked

    def gradient_on(self, rows: Indices, sizes: Indices) -> Gradient:
        self.partial = self._always_partial

        def gradient(step: int, w: Floats, out: Floats) -> Floats:
            losses = np.empty(len(w), np.float32)
            own = sizes[step, : len(w)]
            if len(w) == 1:
                losses[0] = self._one(w[0], rows[step, 0, : own[0]], out[0])
                return losses
            for size in np.unique(own):  # a mean needs mini-batches of equal size
                (alike,) = np.nonzero(own == size)
                if self._stacked == 1 or len(alike) < _FEW:
                    for k in alike:
                        losses[k] = self._one(w[k], rows[step, k, :size], out[k])
                elif len(alike) == len(w):
                    losses[:] = self._many(w, rows[step, alike, :size], out)
                else:
                    part = np.empty((len(alike), w.shape[1]), np.float32)
                    losses[alike] = self._many(w[alike], rows[step, alike, :size], part)
                    out[alike] = part
            return losses

        return gradient

    def _one(self, w: Floats, rows: Indices, out: Floats) -> float:
        """Return the loss of `w`, shape (d,); write its gradient."""
        self._flat.load(w)
        batch = torch.from_numpy(rows)
        x, y = model_inputs(self._x[batch], self._scale), self._y[batch]
        if self._layers is not None:
            value = self._layers.differentiate(x, y)
            np.copyto(out, self._flat.gradient.numpy())
            return value
        self._flat.gradient.zero_()
        loss = mean_loss(self._task, self._flat.module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.partial = self.partial or bool(self._flat.without_gradient())
        np.copyto(out, self._flat.gradient.numpy())
        return loss.item()

    def _many(self, w: Floats, rows: Indices, out: Floats) -> Floats:
        """Return the losses of `w`, shape (jobs, d), on `rows`, shape (jobs, b); write the gradients."""
        batch = torch.from_numpy(rows)
        x = model_inputs(self._x[batch], self._scale)
        stack, into = torch.from_numpy(w), torch.from_numpy(out)
        models = {name: stack[:, part].view(len(w), *shape) for name, part, shape in self._parts}
        gradients, losses = self._each(models, x, self._y[batch])
        for name, part, _ in self._parts:
            into[:, part] = gradients[name].flatten(1)
        found: Floats = losses.numpy()
        return found

    def _mean_loss(
        self, parameters: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        outputs = functional_call(self._flat.module, dict(parameters), (x,))
        return mean_loss(self._task, outputs, y)


@dataclass(frozen=True)
class _Trial:
    w: Floats
    """Shape (2, d)."""
    rows: Indices
    """Indices of their samples, shape (2, b)."""
    losses: Floats
    """Shape (2,)."""
    gradients: Floats
    """Shape (2, d)."""

    def equals(self, losses: Floats, gradients: Floats) -> bool:
        """Same to rounding. Results that are not finite prove nothing."""
        if not (np.isfinite(self.losses).all() and np.isfinite(self.gradients).all()):
            return False
        return np.allclose(losses, self.losses, _ROUNDING, _ROUNDING) and all(
            np.allclose(found, expected, _ROUNDING, _ROUNDING * float(np.abs(expected).max()))
            for found, expected in zip(gradients, self.gradients, strict=True)
        )


_ROUNDING = 1e-4
"""Maximum difference of float32 results, relative to the result or to the gradient's largest entry."""


def is_plain(module: nn.Module) -> bool:
    """Nothing attached to `module` or its layers changes what they compute: no hooks, no other
    `forward`."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_layers = any(
        "forward" in vars(one) or any(getattr(one, name) for name in hooks) for one in module.modules()
    )
    on_tensors = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters())
    everywhere = any(getattr(nn.modules.module, f"_global{name}", None) for name in hooks)
    return not (on_layers or on_tensors or everywhere)


REPEATED = "a layer stands in it several times"


def has_repeated_layer(module: nn.Module) -> bool:
    """Whether a layer has several names. `functional_call` leaves tensors of a stack in it."""
    return len([*module.named_modules(remove_duplicate=False)]) > len([*module.modules()])


def _stacks_faster(module: nn.Module) -> bool:
    """On a CPU, stacking saves overhead per call, of which small operations consist mostly. Convolutions
    and recurrent layers have little, and are slower in a stack (docs/evidence/virtual-time.md)."""
    return not any(isinstance(layer, _ConvNd | nn.RNNBase) for layer in module.modules())


def _weights(sizes: Indices, width: int) -> Floats:
    """Shape (steps, jobs, width): 1/size for samples of a mini-batch, 0 for its padding."""
    sizes = sizes[:, :, None]
    weights: Floats = np.divide(np.arange(width) < sizes, sizes, dtype=np.float32)
    return weights
