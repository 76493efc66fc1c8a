"""Loss and gradient of a sequence of common layers, without autograd.

For small networks, autograd and the calls of modules take about as long as the arithmetic. Here, each
layer calls PyTorch's kernels itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Protocol, Self

import torch
from torch import nn

from agents.tasks.interface import Task, mean_loss

_aten = torch.ops.aten
_MEAN = 1
"""Number of the reduction `mean` in PyTorch's kernels."""


class NetworkLayer(Protocol):
    """`backward` belongs to the last call of `forward`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    def backward(self, g: torch.Tensor, *, needs_input: bool) -> torch.Tensor | None:
        """Write the gradients of the parameters. `g`: gradient of the output. Return that of the input
        if needed."""
        ...


class Layers:
    """Loss and gradient of an `nn.Sequential`, layer by layer.

    The gradient is written to the attribute `grad` of each parameter, whose memory must exist. Two
    threads must not use the same object together.
    """

    def __init__(self, task: Task, unlearned: list[nn.Module], layers: list[NetworkLayer]) -> None:
        """`unlearned`: layers without parameters that come first; they need no backward pass."""
        self._task = task
        self._is_cross_entropy = (type(task).loss, type(task).weights) == (Task.loss, Task.weights)
        self.unlearned, self.layers = unlearned, layers
        self._one = torch.ones(())

    @classmethod
    def from_module(cls, task: Task, module: nn.Module) -> Self | None:
        """None if the module is not a sequence of layers in `_LAYERS`. Its parameters must keep their
        memory."""
        if type(module) is not nn.Sequential or not all(p.requires_grad for p in module.parameters()):
            return None
        modules = list(_flattened(module))
        learns = [any(True for _ in one.parameters()) for one in modules]
        first = learns.index(True)
        layers = list[NetworkLayer]()
        for one in _relu_after_pooling(modules[first:]):
            make = _LAYERS.get(type(one))
            layer = None if make is None else make(one)
            if layer is None:
                return None
            layers.append(layer)
        return cls(task, modules[:first], layers)

    @torch.inference_mode()
    def differentiate(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Return the mean loss; write the gradients."""
        for one in self.unlearned:
            x = one(x)
        for layer in self.layers:
            x = layer.forward(x)
        loss, g = self.loss(x, y)
        for layer in reversed(self.layers[1:]):
            inner = layer.backward(g, needs_input=True)
            assert inner is not None  # noqa: S101  (it was asked for)
            g = inner
        self.layers[0].backward(g, needs_input=False)
        return loss

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Mean loss, and gradient of the outputs."""
        if self._is_cross_entropy and outputs.dim() == 2 and y.dim() == 1:
            logs = torch.log_softmax(outputs, 1)
            value, count = _aten.nll_loss_forward.default(logs, y, None, _MEAN, -100)
            g = _aten.nll_loss_backward.default(self._one, logs, y, None, _MEAN, -100, count)
            return value.item(), _aten._log_softmax_backward_data.default(g, logs, 1, torch.float32)
        with torch.inference_mode(mode=False), torch.enable_grad():
            outputs = outputs.clone().requires_grad_()
            value = mean_loss(self._task, outputs, y.clone())
            (g,) = torch.autograd.grad(value, outputs)
        return value.item(), g


def _flattened(module: nn.Sequential) -> Iterator[nn.Module]:
    """Includes the layers of inner sequences."""
    for one in module:
        if type(one) is nn.Sequential:
            yield from _flattened(one)
        elif type(one) is not nn.Identity:
            yield one


def _relu_after_pooling(modules: list[nn.Module]) -> list[nn.Module]:
    """Exchange each ReLU with a maximum pooling behind it: values and gradients stay, and ReLU has fewer
    values."""
    modules = list(modules)
    for k, (one, after) in enumerate(itertools.pairwise(modules)):
        if type(one) is nn.ReLU and type(after) is nn.MaxPool2d:
            modules[k : k + 2] = after, one
    return modules


class _Convolution:
    def __init__(self, layer: nn.Conv2d) -> None:
        self._layer = layer
        self._weight = layer.weight.detach()
        self._bias = None if layer.bias is None else layer.bias.detach()
        assert not isinstance(layer.padding, str)  # noqa: S101  (see `make`)
        self._sizes = list(layer.stride), list(layer.padding), list(layer.dilation)
        # With one input channel, oneDNN's gradient takes up to three times as long as the plain one.
        self._plain = layer.in_channels == 1 and layer.dilation == (1, 1)

    @classmethod
    def make(cls, layer: nn.Conv2d) -> Self | None:
        return None if isinstance(layer.padding, str) or layer.padding_mode != "zeros" else cls(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._x = x
        return torch.conv2d(x, self._weight, self._bias, *self._sizes, self._layer.groups)

    def backward(self, g: torch.Tensor, *, needs_input: bool) -> torch.Tensor | None:
        layer, (stride, padding, dilation) = self._layer, self._sizes
        wanted = [needs_input, True, False]
        inner: torch.Tensor | None
        if self._plain:
            inner, weight, _ = _aten._slow_conv2d_backward.output_mask(
                g, self._x, self._weight, list(layer.kernel_size), stride, padding, wanted
            )
        else:
            inner, weight, _ = _aten.convolution_backward.default(
                *(g, self._x, self._weight, None, stride, padding, dilation, False, [0, 0]),
                *(layer.groups, wanted),
            )
        assert layer.weight.grad is not None  # noqa: S101
        layer.weight.grad.copy_(weight)
        if layer.bias is not None:
            torch.sum(g, (0, 2, 3), out=layer.bias.grad)
        return inner


class _Linear:
    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._weight = layer.weight.detach()
        self._bias = None if layer.bias is None else layer.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._x = x
        return nn.functional.linear(x, self._weight, self._bias)

    def backward(self, g: torch.Tensor, *, needs_input: bool) -> torch.Tensor | None:
        layer = self._layer
        torch.mm(g.t(), self._x, out=layer.weight.grad)  # fails if x has more than two dimensions
        if layer.bias is not None:
            torch.sum(g, 0, out=layer.bias.grad)
        return g.mm(self._weight) if needs_input else None


class _Embedding:
    def __init__(self, layer: nn.Embedding) -> None:
        self._layer = layer
        self._weight = layer.weight.detach()

    @classmethod
    def make(cls, layer: nn.Embedding) -> Self | None:
        settings = layer.padding_idx, layer.max_norm, layer.scale_grad_by_freq, layer.sparse
        return cls(layer) if settings == (None, None, False, False) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._x = x
        return nn.functional.embedding(x, self._weight)

    def backward(self, g: torch.Tensor, *, needs_input: bool) -> torch.Tensor | None:
        assert self._layer.weight.grad is not None  # noqa: S101
        gradient = _aten.embedding_dense_backward.default(
            *(g, self._x, len(self._weight), -1),
            scale_grad_by_freq=False,
        )
        self._layer.weight.grad.copy_(gradient)
        return None  # tokens have no gradient


class _MaxPooling:
    def __init__(self, layer: nn.MaxPool2d) -> None:
        sizes = layer.kernel_size, layer.stride, layer.padding, layer.dilation
        self._settings = *map(_pair, sizes), layer.ceil_mode

    @classmethod
    def make(cls, layer: nn.MaxPool2d) -> NetworkLayer | None:
        if layer.return_indices:
            return None
        pooling = cls(layer)
        *_, is_rounded_up = pooling._settings
        halves = pooling._settings[:4] == ([2, 2], [2, 2], [0, 0], [1, 1]) and not is_rounded_up
        return _Halving() if halves else pooling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._x = x
        y, self._places = _aten.max_pool2d_with_indices.default(x, *self._settings)
        found: torch.Tensor = y
        return found

    def backward(self, g: torch.Tensor, *, needs_input: bool) -> torch.Tensor | None:
        inner: torch.Tensor = _aten.max_pool2d_with_indices_backward.default(
            g, self._x, *self._settings, self._places
        )
        return inner


class _Halving:
    """Pooling by 2×2 windows: the maximum of two columns, then that of two rows. PyTorch's own takes
    five times as long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._shape = x.shape
        rows, columns = (size - size % 2 for size in x.shape[-2:])
        self._x = x[..., :rows, :columns]
        self._wide = torch.maximum(self._x[..., ::2], self._x[..., 1::2])
        return torch.maximum(self._wide[..., ::2, :], self._wide[..., 1::2, :])

    def backward(self, g: torch.Tensor, *, needs_input: bool) -> torch.Tensor | None:
        x, wide = self._x, self._wide
        inner = g.new_empty(self._shape) if x.shape == self._shape else g.new_zeros(self._shape)
        part = inner[..., : x.shape[-2], : x.shape[-1]]
        g_wide = torch.empty_like(wide)
        _route(g, wide[..., ::2, :], wide[..., 1::2, :], g_wide[..., ::2, :], g_wide[..., 1::2, :])
        _route(g_wide, x[..., ::2], x[..., 1::2], part[..., ::2], part[..., 1::2])
        return inner


def _route(
    g: torch.Tensor, one: torch.Tensor, other: torch.Tensor, to_one: torch.Tensor, to_other: torch.Tensor
) -> None:
    """`g`: gradient of the maximum of `one` and `other`. If they are equal, `one` gets it, as in
    PyTorch's pooling."""
    torch.mul(g, one >= other, out=to_one)
    torch.sub(g, to_one, out=to_other)


class _AveragePooling:
    def __init__(self, layer: nn.AvgPool2d) -> None:
        sizes = layer.kernel_size, layer.stride, layer.padding
        self._settings = (
            *map(_pair, sizes),
            *(layer.ceil_mode, layer.count_include_pad, layer.divisor_override),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._x = x
        found: torch.Tensor = _aten.avg_pool2d.default(x, *self._settings)
        return found

    def backward(self, g: torch.Tensor, *, needs_input: bool) -> torch.Tensor | None:
        inner: torch.Tensor = _aten.avg_pool2d_backward.default(g, self._x, *self._settings)
        return inner


class _Flatten:
    @classmethod
    def make(cls, layer: nn.Flatten) -> Self | None:
        return cls() if (layer.start_dim, layer.end_dim) == (1, -1) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._shape = x.shape
        return x.flatten(1)

    def backward(self, g: torch.Tensor, *, needs_input: bool) -> torch.Tensor | None:
        return g.view(self._shape)


class _Activation:
    """Function of single values whose derivative follows from its result."""

    def __init__(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        derive: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """`derive`: from the gradient of the result, and the result, to the gradient of the argument."""
        self._function, self._derive = function, derive

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._y = self._function(x)
        return self._y

    def backward(self, g: torch.Tensor, *, needs_input: bool) -> torch.Tensor | None:
        return self._derive(g, self._y)


def _pair(size: int | tuple[int, ...]) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)


_LAYERS: dict[type[nn.Module], Callable[..., NetworkLayer | None]] = {
    nn.Conv2d: _Convolution.make,
    nn.Linear: _Linear,
    nn.Embedding: _Embedding.make,
    nn.MaxPool2d: _MaxPooling.make,
    nn.AvgPool2d: _AveragePooling,
    nn.Flatten: _Flatten.make,
    nn.ReLU: lambda _: _Activation(torch.relu, lambda g, y: _aten.threshold_backward.default(g, y, 0)),
    nn.Tanh: lambda _: _Activation(torch.tanh, _aten.tanh_backward.default),
    nn.Sigmoid: lambda _: _Activation(torch.sigmoid, _aten.sigmoid_backward.default),
}
"""Makers of layers; None if a layer's settings are not supported."""
