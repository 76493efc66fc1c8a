"""Check of a task's model, before anything is launched: whether it can be exchanged.

Building a model takes PyTorch, whose import takes a second. So a good result is kept in the user's
cache, for these sources, parameters and version of PyTorch.
"""

from __future__ import annotations

import hashlib
import inspect
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import numpy as np

from agents import shards
from agents.shards import Shard
from agents.tasks.interface import Task
from testbed import own_code
from testbed.host import cache
from testbed.own_code import StandIn
from testbed.plan.datasets import DATASETS
from testbed.topology import Topology

_TRIED = 64
"""Samples."""


def check(topology: Topology) -> int:
    """The number of the model's parameters. Raises BadInputError where the task's model is something
    other than float32 parameters, or where there is no such dataset as a user's task has."""
    task: Task = topology.task.build()
    if task.dataset not in (None, *DATASETS):
        message = f"{topology.task.name} learns from {task.dataset!r}, expected {', '.join(DATASETS)}"
        raise topology.source.error([topology.source.problem(("task", "name"), message)])
    mark = fingerprint(task)
    good = None if mark is None else cache.folder() / "models" / mark
    if good is not None:
        with suppress(OSError, ValueError):
            return int(good.read_text(encoding="utf-8"))
    try:
        count = own_code.ask(task, "parameters") if isinstance(task, StandIn) else _parameters(task)
    except ValueError as error:
        problem = topology.source.problem(("task", "name"), f"{topology.task.name} cannot run: {error}")
        raise topology.source.error([problem]) from error
    if good is not None:
        cache.keep(good, f"{count}\n")
    return int(count)


def _parameters(task: Task) -> int:
    """How many its model has. Raises ValueError."""
    import torch

    from agents import flat

    with torch.random.fork_rng(devices=[]):  # the run's draws are its own
        module = task.model()
    flat.check(module)
    return sum(parameter.numel() for parameter in module.parameters())


def try_step(topology: Topology, train: Shard) -> None:
    """Try a training step of a user's task on some samples of `train`, of every label that there is as
    far as they are not too many. Raises BadInputError where it cannot be done."""
    task = topology.task.build()
    if not isinstance(task, StandIn):
        return
    _, first = np.unique(train.y, return_index=True, axis=0)
    chosen = np.unique(np.concatenate([np.arange(min(len(train), _TRIED)), np.sort(first)[-_TRIED:]]))
    with tempfile.TemporaryDirectory(prefix="testbed-step-") as folder:
        file = Path(folder, "samples.safetensors")
        shards.save(Shard(train.x[chosen], train.y[chosen], train.scale), file)
        try:
            own_code.ask(task, "step", samples=str(file), seed=topology.seed)
        except ValueError as error:
            message = f"{topology.task.name} cannot run: {error}"
            problem = topology.source.problem(("task", "name"), message)
            raise topology.source.error([problem]) from error


def fingerprint(task: Task) -> str | None:
    """Another one where the task's model may be another; None where the source cannot be read."""
    try:
        if isinstance(task, StandIn):
            code, _, name = task.stands_for
            texts = [code.digest.encode(), name.encode()]
        else:
            sources = sorted(Path(inspect.getfile(type(task))).parent.glob("*.py"))
            texts = [path.read_bytes() for path in sources]
    except (OSError, TypeError):  # made in a notebook
        return None
    facts = [repr(task), type(task).__qualname__, metadata.version("torch")]
    return hashlib.sha256(b"\0".join([*map(str.encode, facts), *texts])).hexdigest()[:16]
