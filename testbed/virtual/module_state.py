"""State of a model's code outside its parameters and buffers.

In containers, each device has a module of its own. In virtual time, all devices share a few, so such a
state would go from one device to the next.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from agents.config import FROM_TASK, InitialModel
from agents.disk.files import checksum_of
from agents.models import flat
from agents.models.flat import build, learned, stored_buffers
from agents.shards import Shard
from agents.tasks.interface import Task, mean_loss
from testbed.errors import BadInputError

_TRIED = 4
_STEPS = 2
"""Steps after which the state must not change any more: the first may fill a cache."""
_NAMED = 3


def refuse_hidden_state(task: Task, train: Shard, start: InitialModel = FROM_TASK) -> None:
    """Repeat a training step with equal weights, samples and random numbers. Raises BadInputError if
    something besides learned parameters and stored buffers is different afterwards, such as a counter in
    an attribute, or if the step has another gradient, as with a counter in a global variable."""
    with flat.unchanged_generators():
        module = build(task, start)
        samples = train.subset(np.arange(min(_TRIED, len(train))))
        weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        gradients = [_step(task, module, weights, samples) for _ in range(_STEPS)]
        before = dict(_hidden(task, module))
        gradients.append(_step(task, module, weights, samples))
        after = dict(_hidden(task, module))
    changed = [name for name in after if after[name] != before.get(name)]
    *_, last, again = gradients
    if last is None or again is None:  # the first training says why
        return
    if not changed and not torch.allclose(last, again, rtol=1e-3, atol=1e-6, equal_nan=True):
        changed = ["a variable outside of its module"]
    if changed:
        more = f" and {len(changed) - _NAMED} more" if changed[_NAMED:] else ""
        raise BadInputError(
            f"the model of {type(task).__name__} changes {', '.join(changed[:_NAMED])}{more} in each "
            "step. In virtual time all devices share the module, so one device would continue with what "
            "another has left there: keep it in a buffer (register_buffer), which belongs to a device's "
            "model, or choose another runtime, where each device has its own module"
        )


def _step(task: Task, module: nn.Module, weights: dict[str, Any], samples: Shard) -> torch.Tensor | None:
    """Shape (d,); None if it cannot be computed."""
    with suppress(Exception):
        module.load_state_dict(weights)
        module.zero_grad()
        flat.seed_generators(0)
        x, y = samples.tensors()
        mean_loss(task, module(x), y).backward()  # type: ignore[no-untyped-call]
        found = (one.grad for one in module.parameters() if one.grad is not None)
        return torch.cat([one.detach().reshape(-1) for one in found]).clone()
    return None


def _hidden(task: Task, module: nn.Module) -> Iterator[tuple[str, int]]:
    """Name and content of everything that a step might change and that is in no message."""
    exchanged = {name for name, _ in [*learned(module), *stored_buffers(module)]}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name not in exchanged:
            yield name, _content(tensor.detach())
    for path, one in module.named_modules():
        own = vars(one).items() if type(one).__module__.partition(".")[0] != "torch" else ()
        for name, value in (*own, *_class_attributes(type(one))):
            if name not in _OF_MODULES:
                yield f"{path}.{name}".lstrip("."), _content(value)
    for name, value in (*getattr(task, "__dict__", {}).items(), *_class_attributes(type(task))):
        yield f"{type(task).__name__}.{name}", _content(value)


_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module: parameters, buffers, layers, hooks, `training`."""


def _class_attributes(kind: type) -> Iterator[tuple[str, Any]]:
    """Data in attributes of the user's classes."""
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] in ("torch", "builtins", "agents", "typing", "abc"):
            continue
        for name, value in vars(one).items():
            if not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                yield name, value


def _content(value: object) -> int:
    """Checksum; 0 for what has no comparable content."""
    file = io.BytesIO()
    with suppress(Exception):  # locks, open files, local functions
        _Pickler(file).dump(value)
        return checksum_of(file.getbuffer())
    return 0


class _Pickler(pickle.Pickler):
    """Modules by name; tensors and generators by a checksum, as frozen parameters may be large."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, nn.Module):
            return str, (type(value).__name__,)
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            return int, (checksum_of(flat.view(torch.uint8).numpy().data),)
        if isinstance(value, torch.Generator):
            return int, (checksum_of(value.get_state().numpy().data),)
        return NotImplemented
