"""Stand-ins for a user's tasks, rules and selections: dataclasses with the same parameters, without the
user's code.

Topologies are checked against the stand-ins, and the plan gets its facts from them. A separate process
imports the code and answers the stand-ins' questions (`testbed.user_code.inspector`).
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

from agents import shards, user_code
from agents.rules.interface import ClientSide, Sums
from agents.shards import Shard
from agents.tasks.interface import Splits
from testbed.errors import BadInputError
from testbed.user_code.inspector import Inspector, RaisedError, UserCode, import_folder

Kind = Literal["task", "rule", "selection"]
_LITERAL: Any = Literal
_UNION: Any = Union
"""Names for arguments that are known at run time only."""
_TYPES: Mapping[str, Any] = {"bool": bool, "float": float, "int": int, "str": str, "None": type(None)}


class StandIn:
    """Stand-in for an object of a user's class: a dataclass with the same parameters."""

    stands_for: ClassVar[tuple[UserCode, Kind, str]]

    def __post_init__(self) -> None:
        """Raises ValueError if the user's class refuses the parameters."""
        ask(self, "facts")

    def check(self, clients: int) -> None:
        """Raises ValueError if the task, rule or selection cannot work with `clients` clients."""
        ask(self, "check", clients=clients)


class TaskStandIn(StandIn):
    """Stand-in for an `agents.tasks.interface.Task`, without model, loss and metric."""

    dataset: ClassVar[str | Callable[[Any], Splits] | None]
    """Name, or method that returns the dataset; None if the task brings its own shards."""
    has_accuracy: ClassVar[bool]
    has_perplexity: ClassVar[bool]
    fits: ClassVar[bool]

    def shards_for(self, clients: int) -> list[Shard]:
        return [shards.load(Path(path)) for path in ask(self, "shards", clients=clients)]


def _dataset(task: TaskStandIn) -> Splits:
    """Raises ValueError if the task's own method `dataset` does not return a dataset."""
    with tempfile.TemporaryDirectory(prefix="testbed-dataset-") as folder:
        found: dict[str, dict[str, Any]] = {}
        for split in ask(task, "dataset", to=folder):
            with np.load(Path(folder, f"{split}.npz"), allow_pickle=False) as file:
                found[split] = {name: file[name] for name in file.files}
        return found


class RuleStandIn(StandIn):
    """Stand-in for an `agents.rules.interface.Rule`, without the rule itself."""

    @property
    def client_side(self) -> ClientSide:
        return ClientSide(**ask(self, "facts")["client_side"])

    @property
    def assumes_uniform(self) -> str:
        return str(ask(self, "facts")["assumes_uniform"])

    @property
    def draws(self) -> bool:
        return bool(ask(self, "facts")["draws"])

    @property
    def takes_fednova(self) -> bool:
        return bool(ask(self, "facts")["takes_fednova"])

    @property
    def keeps_bases(self) -> bool:
        return bool(ask(self, "facts")["keeps_bases"])

    def sums(self) -> Sums:
        found = ask(self, "facts")["sums"]
        if "reason" in found:
            raise ValueError(found["reason"])
        return Sums(**found)


class SelectionStandIn(StandIn):
    """Stand-in for an `agents.selection.interface.ClientSelection`, without its methods."""

    @property
    def needs_loss(self) -> bool:
        return bool(ask(self, "facts")["needs_loss"])

    @property
    def needs_battery(self) -> bool:
        return bool(ask(self, "facts")["needs_battery"])


_BASES: Mapping[Kind, type[StandIn]] = {
    "task": TaskStandIn,
    "rule": RuleStandIn,
    "selection": SelectionStandIn,
}


def ask(one: StandIn, question: str, **facts: Any) -> Any:
    """A question is a key of `testbed.user_code.inspection_process._QUESTIONS`.

    Raises ValueError if the user's class refuses, and BadInputError with the traceback if the user's
    code raises.
    """
    code, kind, name = one.stands_for
    try:
        return _ask(code, question, kind, name, params=vars(one), **facts)
    except RaisedError as error:
        raise BadInputError(f"{name} in {code.path} failed:\n{error}") from error


def _ask(code: UserCode, question: str, kind: Kind, name: str, **facts: Any) -> Any:
    """Raises ValueError if the class refuses, and RaisedError with the traceback if its code raises."""
    request = {"question": question, "kind": kind, "name": name, **facts}
    return _inspector(code).ask(user_code.as_json_values(request))


@functools.lru_cache(maxsize=8)
def _inspector(code: UserCode) -> Inspector:
    return Inspector(code.copy, import_folder(code.path))


@functools.lru_cache(maxsize=64)
def stand_in(code: UserCode, kind: Kind, name: str) -> type[StandIn]:
    """Raises ValueError with a message that says what is wrong with the class, and RaisedError if the
    import of the class raises an exception."""
    found = _ask(code, "class", kind, name)
    fields = []
    for parameter in found["parameters"]:
        default = dataclasses.MISSING if parameter["required"] else _as_tuples(parameter["default"])
        made: Any = field() if default is dataclasses.MISSING else field(default=default)
        fields.append((parameter["name"], _type(parameter["type"]), made))
    attributes = {
        **found["attributes"],
        **({"dataset": _dataset} if found["brings_dataset"] else {}),
        "stands_for": (code, kind, name),
        "__doc__": found["about"],
        "__module__": name.partition(":")[0],
    }
    return dataclasses.make_dataclass(
        name.rpartition(":")[2], fields, bases=(_BASES[kind],), namespace=attributes, frozen=True
    )


def _type(described: Any) -> Any:
    """`described`: made by `testbed.user_code.inspection_process`."""
    match described:
        case str():
            return _TYPES[described]
        case {"literal": values}:
            return _LITERAL[tuple(values)]
        case {"list": inner}:
            return GenericAlias(tuple, (_type(inner), ...))  # lists in YAML are read as tuples
        case {"either": options}:
            return _UNION[tuple(map(_type, options))]
        case {"of": inner, "mark": mark}:
            return Annotated[_type(inner), mark]
    raise ValueError(f"{described} does not describe a type")


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
