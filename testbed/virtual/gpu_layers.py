"""Layers that vmap cannot stack as PyTorch computes them on a GPU, written as operations that it can.

Convolutions stay as they are: vmap makes one convolution with groups, for which cuDNN starts a kernel
per model. On an H100 this was 6 to 7 times as fast as unfolded samples and a batched matrix product.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn


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
