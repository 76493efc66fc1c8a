"""A torch module as one flat vector, and the vector's schema (names and shapes, exchanged as a hash)."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import torch

from agents.vectors import Vector


class FlatModule:
    """`module` whose parameters are views of `w` and whose gradients are views of `gradient`.

    Both are float32 tensors of shape (d,): a step of SGD is one operation on one vector.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        parameters = list(module.parameters())
        self.w = torch.cat([p.detach().reshape(-1) for p in parameters]).to(torch.float32)
        self.gradient = torch.zeros_like(self.w)
        self.schema_hash = schema_hash(module)
        offset = 0
        for p in parameters:
            part = slice(offset, offset + p.numel())
            p.data = self.w[part].view(p.shape)
            p.grad = self.gradient[part].view(p.shape)
            offset += p.numel()

    def load(self, vector: Vector) -> None:
        """Copy `vector`, shape (d,), into the parameters."""
        np.copyto(self.w.numpy(), vector)


def schema_hash(module: torch.nn.Module) -> str:
    """12 hex digits that stand for the names and shapes of `module`'s parameters, in order."""
    schema = [(name, list(p.shape)) for name, p in module.named_parameters()]
    return hashlib.sha256(json.dumps(schema).encode()).hexdigest()[:12]


def initial(module: torch.nn.Module) -> Vector:
    """The flat vector, shape (d,), float32, of `module` as it is."""
    with torch.no_grad():
        flat = torch.cat([p.reshape(-1) for p in module.parameters()])
    vector: Vector = flat.to(torch.float32).numpy()
    return vector
