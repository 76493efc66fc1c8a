"""Check of a task's model, before anything is launched: whether it can be exchanged, and its size.

Building a model takes PyTorch, whose import takes a second. So a good result is kept in the user's
cache, for these sources, parameters and version of PyTorch.
"""

from __future__ import annotations

import hashlib
import inspect
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from agents.tasks.interface import Task
from testbed.host import cache
from testbed.topology import Topology


def check(topology: Topology) -> int:
    """How many float32 numbers the model takes in a message: its parameters, without frozen ones, and
    its buffers. Raises BadInputError where it cannot be exchanged."""
    task: Task = topology.task.build()
    mark = fingerprint(task)
    good = None if mark is None else cache.folder() / "models" / mark
    if good is not None:
        with suppress(OSError, ValueError):
            return int(good.read_text(encoding="utf-8"))
    import torch

    from agents import flat

    with torch.random.fork_rng(devices=[]):  # the run's draws are its own
        try:
            module = task.model()
            flat.check(module)
        except ValueError as error:
            text = f"{topology.task.name} cannot run: {error}"
            problem = topology.source.problem(("task", "name"), text)
            raise topology.source.error([problem]) from error
    count = flat.initial(module).size + flat.buffers_of(module).nbytes // 4
    if good is not None:
        cache.keep(good, f"{count}\n")
    return count


def fingerprint(task: Task) -> str | None:
    """Another one where the task's model may be another; None where the source cannot be read."""
    try:
        sources = sorted(Path(inspect.getfile(type(task))).parent.glob("*.py"))
        texts = [path.read_bytes() for path in sources]
    except (OSError, TypeError):  # made in a notebook
        return None
    facts = [repr(task), type(task).__qualname__, metadata.version("torch")]
    return hashlib.sha256(b"\0".join([*map(str.encode, facts), *texts])).hexdigest()[:16]
