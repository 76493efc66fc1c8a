"""Torch modules as flat vectors of their parameters and buffers, and the random generators that a
model's code may draw from."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.parameter import is_lazy

from agents.config import FROM_TASK, InitialModel
from agents.models.vectors import NONE, Buffers, Vector, finite
from agents.tasks.interface import Task

_BITS = 32
"""NumPy's global generator takes seeds of at most this length."""


def seed_generators(value: int) -> None:
    """Seed all global generators with `value`, from 0 to 2⁶³ − 1."""
    torch.default_generator.manual_seed(value)
    np.random.seed(value % (1 << _BITS))
    random.seed(value)


def generator_states() -> tuple[Any, ...]:
    """Can be compared with ==."""
    name, key, *rest = np.random.get_state(legacy=True)
    return (
        bytes(torch.get_rng_state().numpy()),
        name,
        np.asarray(key).tobytes(),
        *rest,
        random.getstate(),
    )


@contextmanager
def unchanged_generators() -> Iterator[None]:
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


_MAX_NAMED = 3
"""Buffers or parameters that an error names."""
_EXACT = {torch.float32, torch.float16, torch.bfloat16}
"""Floating-point buffers that float32 represents exactly."""


def build(task: Task, start: InitialModel = FROM_TASK) -> torch.nn.Module:
    """Parameters frozen by `start` require no gradient. Raises ValueError if the task's model is not a
    module."""
    module: object = task.model()
    if not isinstance(module, torch.nn.Module):
        raise ValueError(
            f"its model returns {_kind(module)}, expected a torch.nn.Module such as "
            "torch.nn.Sequential(layer, other_layer)"
        )
    if start.weights is not None:
        module.load_state_dict(load_file(start.weights))
    for name, parameter in module.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in start.frozen):
            parameter.requires_grad_(False)  # noqa: FBT003
    return module


def _kind(value: object) -> str:
    """Type of `value` in words, such as `a list`."""
    name = "None" if value is None else type(value).__name__
    return name if value is None else f"a{'n' * (name[0] in 'aeiouAEIOU')} {name}"


def extent(task: Task, frozen: Sequence[str]) -> tuple[int, int, int, list[str]]:
    """float32 values in a message (with buffers), frozen parameters (which are not sent), buffer values
    in a message, and the names of all parameters. `frozen`: names or patterns. Raises ValueError if the
    module does not pass `check`."""
    with unchanged_generators():
        module = build(task, InitialModel(frozen=tuple(frozen)))
    check(module)
    count = sum(p.numel() for _, p in learned(module))
    others = sum(p.numel() for p in module.parameters()) - count
    buffers = buffers_of(module).nbytes // 4
    count += buffers
    return count, others, buffers, [name for name, _ in module.named_parameters()]


def write_start(
    task: Task, seed: int, frozen: Sequence[str], initial: str | None, to: str | None
) -> list[str]:
    """Write the initial state of the run's module, with names, to the safetensors file `to`: from the
    file `initial`, or as the task makes it with `seed`. If `to` is None, only check the file `initial`.

    Return each difference between the file `initial` and the module; if there is one, nothing is
    written.
    """
    module = first_module(task, seed, InitialModel(frozen=tuple(frozen)))
    if initial is not None:
        state = load_file(initial)
        if differences := list(_differences(state, module.state_dict())):
            return differences
        module.load_state_dict(state)
    if to is not None:
        save_file({name: t.detach().clone() for name, t in module.state_dict().items()}, to)
    return []


def _differences(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Each difference of the state `found` from that of the model."""
    for name, tensor in expected.items():
        if name not in found:
            yield f"{name} is missing; the model has it, with shape {list(tensor.shape)}"
        elif found[name].shape != tensor.shape:
            yield f"{name} has shape {list(found[name].shape)}, expected {list(tensor.shape)}"
        elif found[name].is_floating_point() != tensor.is_floating_point():
            kinds = str(found[name].dtype), str(tensor.dtype)
            yield "{} has type {}, expected {}".format(name, *(k.removeprefix("torch.") for k in kinds))
        elif not found[name].to(tensor.dtype).isfinite().all():
            yield f"{name} has values that are not finite"
    for name in found.keys() - expected.keys():
        yield f"{name} is unexpected: the model has no parameter or buffer of that name"


class FlatModule:
    """A module whose learned parameters are views of one vector `w`, and whose gradients are views of
    one vector `gradient`.

    Both are float32 tensors of shape (d,), so that a step of SGD is one operation on one vector. Frozen
    parameters (`requires_grad=False`) are not in these vectors. If the module is not `trained`,
    `gradient` is empty. Raises ValueError if the module does not pass `check`.
    """

    def __init__(self, module: torch.nn.Module, *, trained: bool = True) -> None:
        check(module)
        self.module = module
        parameters = [p for _, p in learned(module)]
        self.w = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.gradient = torch.zeros_like(self.w) if trained else torch.zeros(0)
        self.schema_hash = schema_hash(module)
        self.parts: list[slice] = []
        """Slice of each learned parameter."""
        self._gradients: list[torch.Tensor] = []
        """Gradient of each learned parameter; torch counts the writes to it in its attribute
        `_version`."""
        self._written: list[int] = []
        """`_version` of each gradient at the last call of `without_gradient`."""
        offset = 0
        for p in parameters:
            part = slice(offset, offset + p.numel())
            p.data = self.w[part].view(p.shape)
            self.parts.append(part)
            if trained:
                p.grad = self.gradient[part].view(p.shape).data
                self._gradients.append(p.grad)
            offset += p.numel()
        self.without_gradient()

    def without_gradient(self) -> list[slice]:
        """Parts whose parameters got no gradient since the last call: torch's optimizers do not change
        these."""
        before, self._written = self._written, [gradient._version for gradient in self._gradients]
        if all(map(operator.ne, self._written, before)):
            return []
        triples = zip(self.parts, self._written, before, strict=True)
        return [part for part, now, then in triples if now == then]

    def load(self, vector: Vector, buffers: Buffers = NONE) -> None:
        """`vector`: shape (d,). Empty buffers are not loaded."""
        fill(self.w, vector)
        if buffers.nbytes:
            load_buffers(self.module, buffers)


def fill(tensor: torch.Tensor, vector: Vector) -> None:
    """`tensor` has the same shape, and may be on any torch device. `vector` may be read-only."""
    if tensor.is_cpu:
        np.copyto(tensor.numpy(), vector)
    else:  # a copy, because torch warns about read-only arrays
        tensor.copy_(torch.from_numpy(np.array(vector)))


def vector_of(tensor: torch.Tensor) -> Vector:
    """Copy of `tensor`, which may be on any torch device."""
    vector: Vector = tensor.detach().cpu().numpy().copy()
    return vector


def learned(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters that are trained and sent: those that require a gradient."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def vector_parts(module: torch.nn.Module) -> list[tuple[str, slice, torch.Size]]:
    """Name, slice in the flat vector, and shape of each learned parameter."""
    found, offset = [], 0
    for name, p in learned(module):
        found.append((name, slice(offset, offset + p.numel()), p.shape))
        offset += p.numel()
    return found


def stored_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers in the module's state, each once, even with several names. Those registered with
    `persistent=False` are made by the module's constructor."""
    named = list(module.named_buffers())
    stored = module.state_dict() if named else {}
    return [(name, b) for name, b in named if name in stored]


def buffers_of(module: torch.nn.Module) -> Buffers:
    if not (found := [b for _, b in stored_buffers(module)]):
        return NONE
    floats, integers = (
        torch.cat(
            [torch.empty(0, dtype=kind), *(b.detach().reshape(-1).to("cpu", kind) for b in chosen)]
        )
        for kind, chosen in (
            (torch.float32, [b for b in found if b.is_floating_point()]),
            (torch.int64, [b for b in found if not b.is_floating_point()]),
        )
    )
    return Buffers(floats.numpy(), integers.numpy())


def load_buffers(module: torch.nn.Module, buffers: Buffers) -> None:
    """Raises ValueError for another number of values."""
    found = [b for _, b in stored_buffers(module)]
    for floating, source in ((True, buffers.floats), (False, buffers.integers)):
        chosen = [b for b in found if b.is_floating_point() == floating]
        if sum(b.numel() for b in chosen) != source.size:
            expected = sum(b.numel() for b in chosen)
            raise ValueError(
                f"buffers have {source.size} numbers of one kind, but the model has {expected}"
            )
        with torch.no_grad():
            for b, values in zip(chosen, _split(source, chosen), strict=True):
                b.copy_(torch.from_numpy(values).view(b.shape))


def check(module: torch.nn.Module) -> None:
    """Raise ValueError if the state of `module` cannot be trained and sent. The module needs at least
    one parameter that is trained. Parameters must be float32 and must not share memory. Buffers must be
    finite and of types that can be sent. The state must have no entries other than parameters and
    buffers."""
    if lazy := [name for name, t in _tensors(module) if is_lazy(t)]:
        raise ValueError(
            f"the model has lazy parameters, which have no shape yet ({_some(lazy)}): set the input "
            "sizes of their layers, or call the model once before `model` returns it"
        )
    parameters = learned(module)
    if not parameters:
        raise ValueError("the model has no parameters to train: it has no parameters, or all are frozen")
    if other := [f"{name}: {p.dtype}" for name, p in parameters if p.dtype != torch.float32]:
        raise ValueError(
            f"the model has parameters that are not float32 ({_some(other)}), but models are sent and "
            "aggregated as float32: convert it, e.g. with module.float()"
        )
    if shared := list(_sharing(module)):
        raise ValueError(
            f"the model has parameters that share memory ({_some(shared)}), but parameters are "
            "exchanged one by one: to tie two modules, let them use the same parameter, as in "
            "decoder.weight = encoder.weight; call clone() on other tensors that are "
            "expanded or share memory"
        )
    buffers = stored_buffers(module)
    if other := [f"{name}: {b.dtype}" for name, b in buffers if not _can_be_sent(b)]:
        raise ValueError(
            f"the model has buffers of a type that cannot be sent as float32 or int64 ({_some(other)}): "
            "convert them to float32, or register constants with persistent=False"
        )
    floating = [(name, b) for name, b in buffers if b.is_floating_point()]
    if other := [name for name, b in floating if not finite(vector_of(b.float().reshape(-1)))]:
        raise ValueError(
            f"the model has buffers that are not finite or whose norm is above 1.8e19 ({_some(other)}), "
            "so every update would be rejected: register constants with persistent=False"
        )
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if more := sorted(module.state_dict().keys() - known):
        raise ValueError(
            f"the model's state has entries besides parameters and buffers ({_some(more)}), which would "
            "not be sent: keep them in a buffer"
        )


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All parameters and buffers, each once, even with several names."""
    return [*module.named_parameters(), *module.named_buffers()]


def _sharing(module: torch.nn.Module) -> Iterator[str]:
    """Each learned parameter that shares memory with another tensor, or has elements that share memory
    with each other."""
    trained = {name for name, _ in learned(module)}
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in _tensors(module):
        if name in trained and tensor.numel() > _extent(tensor):
            yield f"{name} is expanded"
        elif tensor.numel() and tensor.layout == torch.strided:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for sharing in by_storage.values():
        sharing.sort(key=lambda named: named[0] not in trained)
        for (one, a), (other, b) in itertools.combinations(sharing, 2):
            if one in trained and _overlap(a, b):
                yield f"{one} and {other} share memory"


def _extent(tensor: torch.Tensor) -> int:
    """Elements of the storage from the tensor's first to its last one, both included."""
    if tensor.layout != torch.strided or not tensor.numel():
        return tensor.numel()
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The tensors are in the same storage. `a` must not be expanded."""
    begins = [t.storage_offset() * t.element_size() for t in (a, b)]
    ends = [(t.storage_offset() + _extent(t)) * t.element_size() for t in (a, b)]
    if max(begins) >= min(ends):
        return False
    if a.dtype != b.dtype or (a.is_contiguous() and b.is_contiguous()):
        return True
    storage = torch.zeros(max(ends) // a.element_size(), dtype=torch.int8)
    one, other = (storage.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (a, b))
    one.fill_(1)
    return bool(other.any())


def _can_be_sent(buffer: torch.Tensor) -> bool:
    if buffer.is_floating_point():
        return buffer.dtype in _EXACT
    return not buffer.is_complex() and buffer.dtype != torch.uint64


def _split(source: Vector, like: Sequence[torch.Tensor]) -> list[Vector]:
    ends = np.cumsum([tensor.numel() for tensor in like])
    return np.split(source, ends[:-1]) if like else []


def _some(names: Sequence[str]) -> str:
    """The first few of `names`, and the number of the others."""
    more = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return ", ".join([*names[:_MAX_NAMED], *more])


def schema_hash(module: torch.nn.Module) -> str:
    """12 hex digits for names, shapes and order of the parameters and buffers that are sent."""
    schema = [(name, list(p.shape)) for name, p in learned(module)]
    schema += [(name, list(b.shape)) for name, b in stored_buffers(module)]
    return hashlib.sha256(json.dumps(schema).encode()).hexdigest()[:12]


def first_module(task: Task, seed: int, start: InitialModel = FROM_TASK) -> torch.nn.Module:
    with unchanged_generators():
        seed_generators(seed)
        return build(task, start)


def first_model(task: Task, seed: int, start: InitialModel = FROM_TASK) -> tuple[Vector, Buffers, str]:
    """Parameters, shape (d,), buffers, and schema hash."""
    module = first_module(task, seed, start)
    return initial(module), buffers_of(module), schema_hash(module)


def initial(module: torch.nn.Module) -> Vector:
    """Learned parameters, shape (d,). Raises ValueError if the module does not pass `check`."""
    check(module)
    with torch.no_grad():
        flat = torch.cat([p.reshape(-1) for _, p in learned(module)])
    vector: Vector = flat.numpy()
    return vector
