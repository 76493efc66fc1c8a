"""Loss and gradient of a task for a stack of models on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from agents.client.resources import keep_float32
from agents.config import FROM_TASK, InitialModel
from agents.models import flat
from agents.models.flat import build, initial, vector_parts
from agents.models.vectors import Vector, norm
from agents.shards import Shard, model_inputs
from agents.tasks.interface import Task, weighted_mean
from testbed.virtual.objectives import (
    REPEATED,
    AnyModule,
    Floats,
    Gradient,
    Indices,
    has_repeated_layer,
)

# Layers that vmap cannot stack as PyTorch computes them on a GPU, written as operations that it can.
#
# Convolutions stay as they are: vmap makes one convolution with groups, for which cuDNN starts a kernel
# per model. On an H100 this was 6 to 7 times as fast as unfolded samples and a batched matrix product.


def stackable(module: nn.Module) -> nn.Module:
    """Replace the computation of the layers that vmap cannot stack. Parameters stay the same."""
    for layer in module.modules():
        if type(layer) is nn.LSTM and _is_plain(layer):
            layer.forward = partial(_lstm, layer)  # type: ignore[method-assign,assignment]
    return module


def _is_plain(layer: nn.LSTM) -> bool:
    return layer.batch_first and not (layer.bidirectional or layer.proj_size or layer.dropout)


def _lstm(
    layer: nn.LSTM, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """nn.LSTM for `x`, shape (b, length, inputs): outputs, and last states."""
    shape = layer.num_layers, len(x), layer.hidden_size
    hidden, cells = state or (x.new_zeros(shape), x.new_zeros(shape))
    last = []
    for number in range(layer.num_layers):
        into, again = (getattr(layer, f"weight_{kind}_l{number}") for kind in ("ih", "hh"))
        fixed = x @ into.T
        if layer.bias:
            fixed = fixed + (getattr(layer, f"bias_ih_l{number}") + getattr(layer, f"bias_hh_l{number}"))
        h, c, outputs = hidden[number], cells[number], []
        for own in fixed.unbind(1):
            i, f, g, o = (own + h @ again.T).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        x = torch.stack(outputs, 1)
        last.append((h, c))
    h, c = (torch.stack(states) for states in zip(*last, strict=True))
    return x, (h, c)


_STACKED = 128
"""Maximum number of models in a stack."""
_MEMORY_SHARE = 0.4
"""Share of the GPU's free memory for a stack. The rest is for recordings of other sizes."""
_TOLERANCE = 1e-2
"""Maximum relative distance of gradients from those on the CPU. Rounding can change the sign of a ReLU's
input, and with it the gradients of a deep network. A fault changes more."""
_WARM_UPS = 3
"""Steps before one is recorded, as PyTorch's documentation of CUDA graphs advises."""


class GpuObjective:
    """Objective on `device`, and the memory there for a stack of models.

    `gradient_on` chooses the stack that `models` fills. Its gradients are those of all models in the
    stack, because a recorded step always uses the same memory.
    """

    def __init__(
        self, task: Task, train: Shard, start: InitialModel = FROM_TASK, device: str = "cuda"
    ) -> None:
        self._task, self._device = task, torch.device(device)
        keep_float32()
        with flat.unchanged_generators():
            module = build(task, start)
        self._start = initial(module)
        self._module, self._parts = stackable(module).to(device), vector_parts(module)
        self._x, self._y = (torch.from_numpy(part).to(device) for part in (train.x, train.y))
        self._scale = train.scale
        self._each = vmap(grad_and_value(self._mean_loss))
        self.partial = False
        self._stacks: dict[tuple[int, int], _Stack] = {}
        """Memory by (number of models, samples per mini-batch)."""
        self._sizes: dict[int, int] = {}
        """Samples per mini-batch -> maximum number of models in a stack."""

    def difference(self, reference: AnyModule) -> str | None:
        """Compare gradients of two models, on mini-batches of one and of two samples. Return why models
        cannot be trained in stacks here; None if they can."""
        if has_repeated_layer(self._module):
            return REPEATED
        rows, sizes = np.array([[[0, len(self._y) - 1], [0, 0]]]), np.array([[2, 1]])
        w = reference.trial_models
        expected = np.empty_like(w)
        try:
            losses = reference.gradient_on(rows, sizes)(0, w, expected)
            stack = _Stack(2, self._start.size, 2, self._device)
            stack.w[:] = self.place(w)
            stack.draw(_Batches(rows, sizes, 2, self._device), 0)
            self._differentiate(stack)
        except Exception as error:  # noqa: BLE001  # vmap may raise anything on the user's code
            return str(error).partition("\n")[0]
        self.partial = reference.partial
        found = stack.g.cpu().numpy()
        alike = all(norm(f - e) <= _TOLERANCE * norm(e) for f, e in zip(found, expected, strict=True))
        alike = alike and np.allclose(stack.losses.cpu().numpy(), losses, rtol=_TOLERANCE)
        return None if alike else "the gradients differ"

    def stack_size(self, batch_size: int) -> int:
        """Number of jobs that fit into the GPU's memory."""
        if self._device.type != "cuda":
            return _STACKED
        if batch_size not in self._sizes:
            free, _ = torch.cuda.mem_get_info(self._device)
            before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._differentiate(_Stack(2, self._start.size, batch_size, self._device))
            each = (torch.cuda.max_memory_allocated(self._device) - before) / 2
            fitting = int(_MEMORY_SHARE * free / each)
            self._sizes[batch_size] = max(1, min(_STACKED, 1 << fitting.bit_length() - 1))
        return self._sizes[batch_size]

    def gradient_on(self, rows: Indices, sizes: Indices) -> Gradient:
        _, jobs, width = rows.shape
        models = 1 << (jobs - 1).bit_length()  # few sizes, because each is recorded
        stack = self._chosen = self._stack(models, width)
        batches = _Batches(rows, sizes, models, self._device)

        def gradient(step: int, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            stack.draw(batches, step)
            if stack.graph is None:
                self._differentiate(stack)
            else:
                stack.graph.replay()
            return stack.losses[: len(w)]

        return gradient

    def models(self, starts: Sequence[Vector]) -> tuple[torch.Tensor, torch.Tensor]:
        n = len(starts)
        self._chosen.w[:n] = self.place(np.stack(starts))
        return self._chosen.w[:n], self._chosen.g[:n]

    def place(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def fetch(self, placed: torch.Tensor) -> Floats:
        found: Floats = placed.cpu().numpy()
        return found

    def squares(self, w: torch.Tensor) -> torch.Tensor:
        return (w * w).sum(1)

    def _stack(self, models: int, width: int) -> _Stack:
        key = models, width
        if key not in self._stacks:
            stack = self._stacks[key] = _Stack(models, self._start.size, width, self._device)
            if self._device.type == "cuda":
                with suppress(RuntimeError):  # some code cannot be recorded
                    stack.graph = self._record(stack)
        return self._stacks[key]

    def _record(self, stack: _Stack) -> torch.cuda.CUDAGraph:
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                self._differentiate(stack)
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._differentiate(stack)
        return graph

    def _differentiate(self, stack: _Stack) -> None:
        x = model_inputs(self._x[stack.rows], self._scale)
        models = {name: stack.w[:, part].view(len(stack.w), *shape) for name, part, shape in self._parts}
        gradients, losses = self._each(models, x, self._y[stack.rows], stack.mask)
        for name, part, _ in self._parts:
            stack.g[:, part] = gradients[name].flatten(1)
        stack.losses.copy_(losses)

    def _mean_loss(
        self,
        parameters: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Only samples whose `mask` is 1 count."""
        outputs = functional_call(self._module, dict(parameters), (x,))
        losses, weights = self._task.loss(outputs, y), self._task.weights(y)
        weights = mask if weights is None else weights * mask
        return weighted_mean(losses, weights)


class _Stack:
    """Memory for a step: a recorded one always uses the same."""

    def __init__(self, models: int, parameters: int, width: int, device: torch.device) -> None:
        self.w = torch.zeros(models, parameters, device=device)
        self.g = torch.empty_like(self.w)
        """Shape (models, d), as the models."""
        self.losses = torch.zeros(models, device=device)
        self.rows = torch.zeros(models, width, dtype=torch.int64, device=device)
        """Indices of samples, shape (models, b)."""
        self.mask = torch.ones(models, width, device=device)
        """0 for a mini-batch's padding, shape (models, b)."""
        self.graph: torch.cuda.CUDAGraph | None = None
        """None if the kernels are started one by one."""

    def draw(self, batches: _Batches, number: int) -> None:
        self.rows.copy_(batches.rows[number])
        self.mask.copy_(batches.mask[number])


class _Batches:
    """`rows` and `mask` of each step, as in `_Stack`. Models without a job use the first sample."""

    def __init__(self, rows: Indices, sizes: Indices, models: int, device: torch.device) -> None:
        steps, jobs, width = rows.shape
        padded = np.zeros((steps, models, width), np.int64)
        padded[:, :jobs] = rows
        lengths = np.ones((steps, models, 1), np.int64)
        lengths[:, :jobs, 0] = sizes
        self.rows = torch.from_numpy(padded).to(device)
        self.mask = (torch.from_numpy(np.arange(width) < lengths)).to(device, torch.float32)
