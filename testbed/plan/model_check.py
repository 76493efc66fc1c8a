"""Check of a task's model, before anything is launched: whether it can be exchanged.

Building a model takes PyTorch, whose import takes a second. So a good result is kept in the user's
cache, for these sources, parameters and version of PyTorch.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

from agents.config import Start
from agents.tasks.interface import Task
from testbed.host import cache
from testbed.topology import Topology

_NAMED = 12
"""Parameters of many that an error names."""


def check(topology: Topology) -> int:
    """The number of the model's parameters that are trained and sent. Raises BadInputError where these
    are not float32, or are not all of the task's model that changes."""
    return _counts(topology)[0]


def freezes(topology: Topology) -> bool:
    """Whether some parameters are neither trained nor sent. Raises as `check`."""
    return _counts(topology)[1] > 0


def _counts(topology: Topology) -> tuple[int, int]:
    """Parameters that are trained and sent, and others."""
    task: Task = topology.task.build()
    mark = fingerprint(task, topology.task.frozen)
    good = None if mark is None else cache.folder() / "models" / mark
    if good is not None:
        with suppress(OSError, ValueError):
            learned, frozen = map(int, good.read_text(encoding="utf-8").split())
            return learned, frozen
    import torch

    from agents import flat

    with torch.random.fork_rng(devices=[]):  # the run's draws are its own
        module = flat.build(task, Start(frozen=topology.task.frozen))
    _check_patterns(topology, [name for name, _ in module.named_parameters()])
    try:
        flat.check(module)
    except ValueError as error:
        problem = topology.source.problem(("task", "name"), f"{topology.task.name} cannot run: {error}")
        raise topology.source.error([problem]) from error
    count = sum(parameter.numel() for _, parameter in flat.learned(module))
    others = sum(parameter.numel() for parameter in module.parameters()) - count
    if good is not None:
        cache.keep(good, f"{count} {others}\n")
    return count, others


def _check_patterns(topology: Topology, names: Sequence[str]) -> None:
    """Raise BadInputError for a pattern of `task.frozen` that no parameter has."""
    problems = [
        topology.source.problem(
            ("task", "frozen", index),
            f"found {pattern!r}, and no parameter of {topology.task.name} has such a name: it has "
            f"{', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}",
        )
        for index, pattern in enumerate(topology.task.frozen)
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if problems:
        raise topology.source.error(problems)


def fingerprint(task: Task, frozen: Sequence[str] = ()) -> str | None:
    """Another one where the task's model may be another, or more of it is frozen; None where the source
    cannot be read."""
    try:
        sources = sorted(Path(inspect.getfile(type(task))).parent.glob("*.py"))
        texts = [path.read_bytes() for path in sources]
    except (OSError, TypeError):  # made in a notebook
        return None
    facts = [
        repr((task, *frozen)) if frozen else repr(task),
        type(task).__qualname__,
        metadata.version("torch"),
    ]
    return hashlib.sha256(b"\0".join([*map(str.encode, facts), *texts])).hexdigest()[:16]
