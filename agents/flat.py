"""A torch module as one flat vector, and the vector's schema (names and shapes, exchanged as a hash)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from agents.config import FROM_TASK, Start
from agents.tasks.interface import Task
from agents.vectors import Vector

_NAMED = 3
"""Buffers or parameters of many that an error names."""


def build(task: Task, start: Start = FROM_TASK) -> torch.nn.Module:
    """The task's module as a run begins with it; what `start` freezes requires no gradient."""
    module = task.model()
    if start.weights is not None:
        module.load_state_dict(load_file(start.weights))
    for name, parameter in module.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in start.frozen):
            parameter.requires_grad_(False)  # noqa: FBT003
    return module


def learned(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Names and parameters of what is trained and sent: all that require a gradient."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def extent(task: Task, frozen: Sequence[str]) -> tuple[int, int, list[str]]:
    """How many of its parameters travel and how many do not, where those that `frozen` names are frozen,
    and all their names. Raises ValueError as `check` does."""
    with torch.random.fork_rng(devices=[]):  # what is drawn here changes no other draws
        module = build(task, Start(frozen=tuple(frozen)))
    check(module)
    count = sum(p.numel() for _, p in learned(module))
    others = sum(p.numel() for p in module.parameters()) - count
    return count, others, [name for name, _ in module.named_parameters()]


def write_start(
    task: Task, seed: int, frozen: Sequence[str], initial: str | None, to: str | None
) -> list[str]:
    """Write to `to` the whole state, by name, of the module that the run with this seed begins with, as
    safetensors; with the state in the file `initial` for the one that the task makes.

    Returns in words how that differs from what the module wants; nothing is written then.
    """
    module = first_module(task, seed, Start(frozen=tuple(frozen)))
    if initial is not None:
        found = load_file(initial)
        if wrong := list(_differences(found, module.state_dict())):
            return wrong
        module.load_state_dict(found)
    if to is not None:
        save_file({name: t.detach().clone() for name, t in module.state_dict().items()}, to)
    return []


def _differences(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """How a state is not as the model's, in words."""
    for name, tensor in expected.items():
        if name not in found:
            yield f"{name} is not in it; the model has it, of shape {list(tensor.shape)}"
        elif found[name].shape != tensor.shape:
            yield f"{name} has shape {list(found[name].shape)} there, expected {list(tensor.shape)}"
        elif not found[name].isfinite().all():
            yield f"{name} has values there that are not finite"
    for name in found.keys() - expected.keys():
        yield f"{name} is in it, and the model has none of that name"


class FlatModule:
    """`module` whose learned parameters are views of `w` and whose gradients are views of `gradient`.

    Both are float32 tensors of shape (d,): a step of SGD is one operation on one vector. Raises
    ValueError as `check` does.
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

    def load(self, vector: Vector) -> None:
        """Copy `vector`, shape (d,), into the parameters."""
        np.copyto(self.w.numpy(), vector)


def check(module: torch.nn.Module) -> None:
    """Raise ValueError where a flat float32 vector of its learned parameters is not all of `module` that
    changes."""
    if buffers := [name for name, _ in module.named_buffers()]:
        raise ValueError(
            f"the model has buffers ({_some(buffers)}), and only parameters are sent and aggregated: "
            "use GroupNorm or LayerNorm in place of BatchNorm, or track_running_stats=False, and keep a "
            "constant as a plain attribute"
        )
    parameters = learned(module)
    if not parameters:
        raise ValueError("the model has no parameters that are not frozen: there is nothing to learn")
    if other := [f"{name}: {p.dtype}" for name, p in parameters if p.dtype != torch.float32]:
        raise ValueError(
            f"the model has parameters that are not float32 ({_some(other)}), and models are sent and "
            "aggregated as float32: build it in float32, as module.float() does"
        )


def _some(names: Sequence[str]) -> str:
    """The first of `names`, and how many more there are."""
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])


def schema_hash(module: torch.nn.Module) -> str:
    """12 hex digits that stand for the names and shapes of `module`'s learned parameters, in order."""
    schema = [(name, list(p.shape)) for name, p in learned(module)]
    return hashlib.sha256(json.dumps(schema).encode()).hexdigest()[:12]


def first_module(task: Task, seed: int, start: Start = FROM_TASK) -> torch.nn.Module:
    """The module that the run with this seed begins with."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(task, start)


def first_model(task: Task, seed: int, start: Start = FROM_TASK) -> tuple[Vector, str]:
    """The model, shape (d,), that the run with this seed begins with, and its schema's hash."""
    module = first_module(task, seed, start)
    return initial(module), schema_hash(module)


def initial(module: torch.nn.Module) -> Vector:
    """The flat vector, shape (d,), of `module` as it is. Raises ValueError as `check` does."""
    check(module)
    with torch.no_grad():
        flat = torch.cat([p.reshape(-1) for _, p in learned(module)])
    vector: Vector = flat.numpy()
    return vector
