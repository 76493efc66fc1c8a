"""A torch module as one flat vector of its parameters and its buffers, and the schema of both (names and
shapes, exchanged as a hash)."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.parameter import is_lazy

from agents.config import FROM_TASK, InitialModel
from agents.models.buffers import NONE, Buffers
from agents.models.vectors import Vector, finite
from agents.tasks.interface import Task

_NAMED = 3
"""Buffers or parameters of many that an error names."""
_EXACT = {torch.float32, torch.float16, torch.bfloat16}
"""Types of floating buffers that a float32 holds."""


def build(task: Task, start: InitialModel = FROM_TASK) -> torch.nn.Module:
    """The task's module as a run begins with it; what `start` freezes requires no gradient."""
    module = task.model()
    if start.weights is not None:
        module.load_state_dict(load_file(start.weights))
    for name, parameter in module.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in start.frozen):
            parameter.requires_grad_(False)  # noqa: FBT003
    return module


def extent(task: Task, frozen: Sequence[str]) -> tuple[int, int, int, list[str]]:
    """How many float32 numbers the model takes in a message, buffers included; how many of its
    parameters do not travel, where those that `frozen` names are frozen; how many of the numbers are
    buffers; and the names of all parameters. Raises ValueError as `check` does."""
    with torch.random.fork_rng(devices=[]):  # what is drawn here changes no other draws
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
    """Write to `to` the whole state, by name, of the module that the run with this seed begins with, as
    safetensors; with the state in the file `initial` for the one that the task makes.

    Returns in words how that differs from what the module wants; nothing is written then.
    """
    module = first_module(task, seed, InitialModel(frozen=tuple(frozen)))
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
        elif found[name].is_floating_point() != tensor.is_floating_point():
            kinds = str(found[name].dtype), str(tensor.dtype)
            yield "{} has {} there, expected {}".format(name, *(k.removeprefix("torch.") for k in kinds))
        elif not found[name].to(tensor.dtype).isfinite().all():
            yield f"{name} has values there that are not finite"
    for name in found.keys() - expected.keys():
        yield f"{name} is in it, and the model has none of that name"


class FlatModule:
    """`module` whose learned parameters are views of `w` and whose gradients share the memory of
    `gradient`.

    Both are float32 tensors of shape (d,): a step of SGD is one operation on one vector. Frozen
    parameters (`requires_grad=False`) are not in them. A module that is not `trained` has no gradient.
    Raises ValueError as `check` does.
    """

    def __init__(self, module: torch.nn.Module, *, trained: bool = True) -> None:
        check(module)
        self.module = module
        parameters = [p for _, p in learned(module)]
        self.w = torch.cat([p.detach().reshape(-1) for p in parameters])
        self.gradient = torch.zeros_like(self.w) if trained else torch.zeros(0)
        self.schema_hash = schema_hash(module)
        self.parts: list[slice] = []
        """Place of each learned parameter in the vectors."""
        self._gradients: list[torch.Tensor] = []
        """Of each, where they are trained; torch counts for each how often it is written to."""
        self._written: list[int] = []
        """Those counts, at the last `without_gradient`."""
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
        """The parts of the vectors whose parameters no backward pass has reached since the last call:
        torch's optimizers leave such parameters as they are."""
        before, self._written = self._written, [gradient._version for gradient in self._gradients]
        if all(map(operator.ne, self._written, before)):
            return []
        triples = zip(self.parts, self._written, before, strict=True)
        return [part for part, now, then in triples if now == then]

    def load(self, vector: Vector, buffers: Buffers = NONE) -> None:
        """Copy `vector`, shape (d,), into the parameters, and `buffers` where they are any."""
        fill(self.w, vector)
        if buffers.nbytes:
            load_buffers(self.module, buffers)


def fill(tensor: torch.Tensor, vector: Vector) -> None:
    """Copy `vector`, which may be read-only, into `tensor` of the same shape, wherever that is."""
    if tensor.is_cpu:
        np.copyto(tensor.numpy(), vector)
    else:  # by a copy, as torch takes no array that is read-only without a warning
        tensor.copy_(torch.from_numpy(np.array(vector)))


def vector_of(tensor: torch.Tensor) -> Vector:
    """A copy of `tensor`, wherever that is."""
    vector: Vector = tensor.detach().cpu().numpy().copy()
    return vector


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
    """Copy `buffers` into those of `module`. Raises ValueError where it has others."""
    found = [b for _, b in stored_buffers(module)]
    for floating, source in ((True, buffers.floats), (False, buffers.integers)):
        chosen = [b for b in found if b.is_floating_point() == floating]
        if sum(b.numel() for b in chosen) != source.size:
            raise ValueError(f"buffers of {source.size} numbers for a model with other ones")
        with torch.no_grad():
            for b, values in zip(chosen, _split(source, chosen), strict=True):
                b.copy_(torch.from_numpy(values).view(b.shape))


def check(module: torch.nn.Module) -> None:
    """Raise ValueError where float32 parameters, with memory of their own, and buffers of numbers that
    can be sent, are not all of `module`."""
    if lazy := [name for name, t in _tensors(module) if is_lazy(t)]:
        raise ValueError(
            f"the model has lazy parameters, which have no shape yet ({_some(lazy)}): give their layers "
            "the sizes of their inputs, or call the model once before `model` returns it"
        )
    parameters = learned(module)
    if not parameters:
        raise ValueError("the model has no parameters to learn: there are none, or all are frozen")
    if other := [f"{name}: {p.dtype}" for name, p in parameters if p.dtype != torch.float32]:
        raise ValueError(
            f"the model has parameters that are not float32 ({_some(other)}), and models are sent and "
            "aggregated as float32: build it in float32, as module.float() does"
        )
    if shared := list(_sharing(module)):
        raise ValueError(
            f"the model has parameters without memory of their own ({_some(shared)}), which are copied "
            "one by one when models are exchanged: tie two by making them one parameter, as in "
            "decoder.weight = encoder.weight, and clone() what is expanded or the data of another"
        )
    buffers = stored_buffers(module)
    if other := [f"{name}: {b.dtype}" for name, b in buffers if not _travels(b)]:
        raise ValueError(
            f"the model has buffers of a type that cannot be sent as float32 or int64 ({_some(other)}): "
            "build it in float32, or register a constant with persistent=False"
        )
    floating = [(name, b) for name, b in buffers if b.is_floating_point()]
    if other := [name for name, b in floating if not finite(vector_of(b.float().reshape(-1)))]:
        raise ValueError(
            f"the model has buffers that are not finite, or of a norm above 1.8e19 ({_some(other)}), "
            "and every update would be rejected for them; register a constant with persistent=False"
        )
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if more := sorted(module.state_dict().keys() - known):
        raise ValueError(
            f"the model's state has more than parameters and buffers ({_some(more)}), which would not "
            "be sent: keep it in a buffer"
        )


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of all parameters and buffers, each once."""
    return [*module.named_parameters(), *module.named_buffers()]


def _sharing(module: torch.nn.Module) -> Iterator[str]:
    """The learned parameters whose memory another tensor uses, too, or holds one number for several of
    their elements, in words."""
    trained = {name for name, _ in learned(module)}
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in _tensors(module):
        if name in trained and tensor.numel() > _extent(tensor):
            yield f"{name} is expanded"
        elif tensor.numel() and tensor.layout == torch.strided:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for alike in by_storage.values():
        alike.sort(key=lambda named: named[0] not in trained)
        for (one, a), (other, b) in itertools.combinations(alike, 2):
            if one in trained and _overlap(a, b):
                yield f"{one} and {other} are one in memory"


def _extent(tensor: torch.Tensor) -> int:
    """Elements of its storage from the first to the last that it has."""
    if tensor.layout != torch.strided or not tensor.numel():
        return tensor.numel()
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors in one storage have any element of it in common; `a` is not expanded."""
    begins = [t.storage_offset() * t.element_size() for t in (a, b)]
    ends = [(t.storage_offset() + _extent(t)) * t.element_size() for t in (a, b)]
    if max(begins) >= min(ends):
        return False
    if a.dtype != b.dtype or (a.is_contiguous() and b.is_contiguous()):
        return True
    taken = torch.zeros(max(ends) // a.element_size(), dtype=torch.int8)
    one, other = (taken.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (a, b))
    one.fill_(1)
    return bool(other.any())


def _travels(buffer: torch.Tensor) -> bool:
    if buffer.is_floating_point():
        return buffer.dtype in _EXACT
    return not buffer.is_complex() and buffer.dtype != torch.uint64


def _split(source: Vector, like: Sequence[torch.Tensor]) -> list[Vector]:
    """`source` cut into vectors of the sizes of `like`."""
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


def first_module(task: Task, seed: int, start: InitialModel = FROM_TASK) -> torch.nn.Module:
    """The module that the run with this seed begins with."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(task, start)


def first_model(task: Task, seed: int, start: InitialModel = FROM_TASK) -> tuple[Vector, Buffers, str]:
    """The model that the run with this seed begins with: its parameters, shape (d,), its buffers, and
    its schema's hash."""
    module = first_module(task, seed, start)
    return initial(module), buffers_of(module), schema_hash(module)


def initial(module: torch.nn.Module) -> Vector:
    """The flat vector, shape (d,), of the parameters of `module` as they are. Raises ValueError as
    `check` does."""
    check(module)
    with torch.no_grad():
        flat = torch.cat([p.reshape(-1) for _, p in learned(module)])
    vector: Vector = flat.numpy()
    return vector
