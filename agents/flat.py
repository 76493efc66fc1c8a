"""A torch module as one flat vector of its parameters and its buffers, and the schema of both (names and
shapes, exchanged as a hash)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch

from agents.buffers import NONE, Buffers
from agents.tasks.interface import Task
from agents.vectors import Vector

_NAMED = 3
"""Buffers or parameters of many that an error names."""
_EXACT = {torch.float32, torch.float16, torch.bfloat16}
"""Types of floating buffers that a float32 holds."""


class FlatModule:
    """`module` whose parameters are views of `w` and whose gradients are views of `gradient`.

    Both are float32 tensors of shape (d,): a step of SGD is one operation on one vector. Frozen
    parameters (`requires_grad=False`) are not in them. Raises ValueError as `check` does.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        check(module)
        self.module = module
        parameters = [p for _, p in learned(module)]
        self.w = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.gradient = torch.zeros_like(self.w)
        self.schema_hash = schema_hash(module)
        offset = 0
        for p in parameters:
            part = slice(offset, offset + p.numel())
            p.data = self.w[part].view(p.shape)
            p.grad = self.gradient[part].view(p.shape)
            offset += p.numel()

    def load(self, vector: Vector, buffers: Buffers = NONE) -> None:
        """Copy `vector`, shape (d,), into the parameters, and `buffers` where they are any."""
        np.copyto(self.w.numpy(), vector)
        if buffers:
            load_buffers(self.module, buffers)


def learned(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters of what is trained and sent: all that require a gradient."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def stored_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that belong to the model's state, each once: all but those that are registered with
    `persistent=False`, which a module makes by itself."""
    found = list(module.named_buffers())
    stored = module.state_dict() if found else {}
    return [(name, b) for name, b in found if name in stored]


def buffers_of(module: torch.nn.Module) -> Buffers:
    """A copy of the buffers of `module`, as they are."""
    if not (found := [b for _, b in stored_buffers(module)]):
        return NONE
    floats, integers = (
        torch.cat([torch.empty(0, dtype=kind), *(b.detach().reshape(-1).to(kind) for b in chosen)])
        for kind, chosen in (
            (torch.float32, [b for b in found if b.is_floating_point()]),
            (torch.int64, [b for b in found if not b.is_floating_point()]),
        )
    )
    return Buffers(floats.numpy(), integers.numpy())


def load_buffers(module: torch.nn.Module, buffers: Buffers) -> None:
    """Copy `buffers` into those of `module`. Raises ValueError where it has others."""
    found = [b for _, b in stored_buffers(module)]
    for floating, source in ((True, buffers.floats), (False, buffers.integers)):
        chosen = [b for b in found if b.is_floating_point() == floating]
        if sum(b.numel() for b in chosen) != source.size:
            raise ValueError(f"buffers of {source.size} numbers for a model with other ones")
        with torch.no_grad():
            for b, part in zip(chosen, _split(source, chosen), strict=True):
                b.copy_(torch.from_numpy(part).view(b.shape))


def check(module: torch.nn.Module) -> None:
    """Raise ValueError where float32 parameters, and buffers, are not all of `module`."""
    parameters = learned(module)
    if not parameters:
        raise ValueError("the model has no parameters to learn: there are none, or all are frozen")
    if other := [f"{name}: {p.dtype}" for name, p in parameters if p.dtype != torch.float32]:
        raise ValueError(
            f"the model has parameters that are not float32 ({_some(other)}), and models are sent and "
            "aggregated as float32: build it in float32, as module.float() does"
        )
    buffers = stored_buffers(module)
    if other := [f"{name}: {b.dtype}" for name, b in buffers if not _travels(b)]:
        raise ValueError(
            f"the model has buffers of a type that cannot be sent as float32 or int64 ({_some(other)}): "
            "build it in float32, or register a constant with persistent=False"
        )
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if more := sorted(module.state_dict().keys() - known):
        raise ValueError(
            f"the model's state has more than parameters and buffers ({_some(more)}), which would not "
            "be sent: keep it in a buffer"
        )


def _travels(buffer: torch.Tensor) -> bool:
    if buffer.is_floating_point():
        return buffer.dtype in _EXACT
    return not buffer.is_complex() and buffer.dtype != torch.uint64


def _split(source: Vector, like: Sequence[torch.Tensor]) -> list[Vector]:
    """`source` in parts of the sizes of `like`."""
    ends = np.cumsum([tensor.numel() for tensor in like])
    return np.split(source, ends[:-1]) if like else []


def _some(names: Sequence[str]) -> str:
    """The first of `names`, and how many more there are."""
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])


def schema_hash(module: torch.nn.Module) -> str:
    """12 hex digits that stand for the names and shapes of what travels of `module`, in order."""
    schema = [(name, list(p.shape)) for name, p in learned(module)]
    schema += [(name, list(b.shape)) for name, b in stored_buffers(module)]
    return hashlib.sha256(json.dumps(schema).encode()).hexdigest()[:12]


def first_model(task: Task, seed: int) -> tuple[Vector, Buffers, str]:
    """The model that the run with this seed begins with: its parameters, shape (d,), its buffers, and
    its schema's hash."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = task.model()
    return initial(module), buffers_of(module), schema_hash(module)


def initial(module: torch.nn.Module) -> Vector:
    """The flat vector, shape (d,), of the parameters of `module` as they are. Raises ValueError as
    `check` does."""
    check(module)
    with torch.no_grad():
        flat = torch.cat([p.reshape(-1) for _, p in learned(module)])
    vector: Vector = flat.numpy()
    return vector
