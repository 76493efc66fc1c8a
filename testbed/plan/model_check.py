"""Check of a task's model, before anything is launched: whether it can be exchanged.

Building a model takes PyTorch, whose import takes a second. So a good result is kept in the user's
cache, for these sources, parameters and version of PyTorch.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import numpy as np

from agents.shards import Shard, inputs
from agents.tasks.interface import Task
from testbed.host import cache
from testbed.topology import Topology


def check(topology: Topology) -> int:
    """The number of the model's parameters. Raises BadInputError where the task's model is something
    other than float32 parameters."""
    task: Task = topology.task.build()
    mark = fingerprint(task)
    good = None if mark is None else cache.folder() / "models" / mark
    if good is not None:
        with suppress(OSError, ValueError):
            return int(good.read_text(encoding="utf-8"))
    import torch

    from agents import flat

    with torch.random.fork_rng(devices=[]):  # the run's draws are its own
        module = task.model()
    try:
        flat.check(module)
    except ValueError as error:
        problem = topology.source.problem(("task", "name"), f"{topology.task.name} cannot run: {error}")
        raise topology.source.error([problem]) from error
    count = sum(parameter.numel() for parameter in module.parameters())
    if good is not None:
        cache.keep(good, f"{count}\n")
    return count


def check_data(topology: Topology, train: Shard) -> None:
    """Raises BadInputError where the task's model and loss do not take the topology's own data."""
    if topology.task.data is None:
        return
    import torch

    task: Task = topology.task.build()
    with torch.random.fork_rng(devices=[]):  # the run's draws are its own
        module = task.model().eval()
    some = train.take(np.arange(min(2, len(train))))
    x, y = inputs(torch.from_numpy(some.x), some.scale), torch.from_numpy(some.y)
    shape = "×".join(map(str, some.x.shape[1:]))
    key = "input"
    try:
        outputs = module(x)
        key = "label"
        if type(task).loss is Task.loss and (message := _no_classes(train, outputs.shape)):
            raise ValueError(message)
        task.loss(outputs, y)
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        reason = str(error).partition("\n")[0]
        what = f"inputs of shape {shape}" if key == "input" else "these labels"
        message = f"{topology.task.name} does not take {what}: {reason}"
        raise topology.source.error([topology.source.problem(("task", "data", key), message)]) from error


def _no_classes(train: Shard, outputs: Sequence[int]) -> str:
    """Why the labels are no classes of a model with outputs of this shape; empty where they are."""
    if train.y.dtype.kind != "i":
        return (
            f"its loss is the cross-entropy, which takes classes, and these are {train.y.dtype}. Name a "
            "column of classes, or take a task with a loss of its own"
        )
    classes, most = outputs[1], int(train.y.max())
    if most >= classes:
        return f"found class {most}, and the model has {classes} outputs, for classes 0 to {classes - 1}"
    return ""


def fingerprint(task: Task) -> str | None:
    """Another one where the task's model may be another; None where the source cannot be read."""
    try:
        sources = sorted(Path(inspect.getfile(type(task))).parent.glob("*.py"))
        texts = [path.read_bytes() for path in sources]
    except (OSError, TypeError):  # made in a notebook
        return None
    facts = [repr(task), type(task).__qualname__, metadata.version("torch")]
    return hashlib.sha256(b"\0".join([*map(str.encode, facts), *texts])).hexdigest()[:16]
