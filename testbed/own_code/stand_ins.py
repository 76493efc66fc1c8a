"""Stand-ins for a user's tasks and rules: dataclasses with the same parameters, and none of the code.

Topologies are checked against them, and they say what the plan needs to know. A process of its own,
which does import the code, answers their questions (`testbed.own_code.inspector`).
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, ClassVar, Literal, Union

import numpy as np

from agents import own_code, shards
from agents.rules.interface import ClientSide, Sums
from agents.shards import Shard
from agents.tasks.interface import Splits
from testbed.errors import BadInputError
from testbed.own_code.code import Code, root_of
from testbed.own_code.inspector import Inspector, RaisedError

Kind = Literal["task", "rule"]
_LITERAL: Any = Literal
_UNION: Any = Union
"""Their arguments are known at run time only."""
_TYPES: Mapping[str, Any] = {"bool": bool, "float": float, "int": int, "str": str, "None": type(None)}


class StandIn:
    """An object of a user's class, without its code: a dataclass with the same parameters."""

    stands_for: ClassVar[tuple[Code, Kind, str]]
    """The class: its code, whether it is a task or a rule, and its name."""

    def __post_init__(self) -> None:
        """Raises ValueError as the class itself does."""
        ask(self, "facts")

    def check(self, clients: int) -> None:
        """Raise ValueError where it cannot work with `clients` clients."""
        ask(self, "check", clients=clients)


class TaskStandIn(StandIn):
    """Of an `agents.tasks.interface.Task`; without model, loss and metric."""

    dataset: ClassVar[str | Callable[[Any], Splits] | None]
    has_accuracy: ClassVar[bool]
    has_perplexity: ClassVar[bool]
    fits: ClassVar[bool]

    def shards_for(self, clients: int) -> list[Shard]:
        """As the task's."""
        return [shards.load(Path(path)) for path in ask(self, "shards", clients=clients)]


def _dataset(task: TaskStandIn) -> Splits:
    """What the task's own method `dataset` returns. Raises ValueError where it is no dataset."""
    with tempfile.TemporaryDirectory(prefix="testbed-dataset-") as folder:
        found: dict[str, dict[str, Any]] = {}
        for split in ask(task, "dataset", to=folder):
            with np.load(Path(folder, f"{split}.npz"), allow_pickle=False) as file:
                found[split] = {name: file[name] for name in file.files}
        return found


class RuleStandIn(StandIn):
    """Of an `agents.rules.interface.Rule`; without the rule itself."""

    @property
    def client_side(self) -> ClientSide:
        return ClientSide(**ask(self, "facts")["client_side"])

    @property
    def takes_fednova(self) -> bool:
        return bool(ask(self, "facts")["takes_fednova"])

    def sums(self) -> Sums:
        found = ask(self, "facts")["sums"]
        if "reason" in found:
            raise ValueError(found["reason"])
        return Sums(**found)


def ask(one: StandIn, question: str, **facts: Any) -> Any:
    """Ask `question` (see `testbed.own_code.inspection`) about the object that `one` stands for. Raises
    ValueError with what its class refuses; BadInputError, with the traceback, where its code raises."""
    code, kind, name = one.stands_for
    try:
        return _ask(code, question, kind, name, params=vars(one), **facts)
    except RaisedError as error:
        raise BadInputError(f"{name} in {code.path} failed:\n{error}") from error


def _ask(code: Code, question: str, kind: Kind, name: str, **facts: Any) -> Any:
    """Raises ValueError with what the class refuses, RaisedError with the traceback of what its code
    raises."""
    request = {"question": question, "kind": kind, "name": name, **facts}
    return _inspector(code).ask(own_code.as_json_values(request))


@functools.lru_cache(maxsize=8)
def _inspector(code: Code) -> Inspector:
    return Inspector(code.copy, root_of(code.path))


@functools.lru_cache(maxsize=64)
def stand_in(code: Code, kind: Kind, name: str) -> type[StandIn]:
    """For the class called `name`. Raises ValueError that says what is wrong with that, RaisedError
    where importing it raises."""
    found = _ask(code, "class", kind, name)
    fields = []
    for parameter in found["parameters"]:
        default = dataclasses.MISSING if parameter["required"] else _frozen(parameter["default"])
        made: Any = field() if default is dataclasses.MISSING else field(default=default)
        fields.append((parameter["name"], _type(parameter["type"]), made))
    base = TaskStandIn if kind == "task" else RuleStandIn
    attributes = {
        **found["attributes"],
        **({"dataset": _dataset} if found["brings_dataset"] else {}),
        "stands_for": (code, kind, name),
        "__doc__": found["about"],
        "__module__": name.partition(":")[0],
    }
    return dataclasses.make_dataclass(
        name.rpartition(":")[2], fields, bases=(base,), namespace=attributes, frozen=True
    )


def _type(described: Any) -> Any:
    """The type hint that `testbed.own_code.inspection` has described."""
    match described:
        case str():
            return _TYPES[described]
        case {"literal": values}:
            return _LITERAL[tuple(values)]
        case {"list": inner}:
            return GenericAlias(tuple, (_type(inner), ...))  # as YAML's are read
        case {"either": options}:
            return _UNION[tuple(map(_type, options))]
        case {"of": inner, "mark": mark}:
            return Annotated[_type(inner), mark]
    raise ValueError(f"{described} describes no type")


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
