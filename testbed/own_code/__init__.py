"""A user's own tasks and rules, as far as the controller needs to know them (docs/own-code.md).

`Code` is the modules. The controller does not import them: a process of their own does
(`testbed.own_code.inspection`), and answers questions about them. For each class a stand-in is made,
with the same parameters: topologies are checked against it, and it says what the plan needs to know.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.machinery
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, ClassVar, Literal, Union

import numpy as np

from agents import own_code, shards
from agents.rules.interface import ClientSide, Sums
from agents.shards import Shard
from agents.tasks.interface import Splits
from testbed.errors import BadInputError
from testbed.own_code.inspector import Inspector, RaisedError

Kind = Literal["task", "rule"]
_MAX_BYTES = 16 * 2**20
_MAX_FILES = 1000
_TAKEN = sys.stdlib_module_names | {"agents", "analysis", "testbed"}
_LITERAL: Any = Literal
_UNION: Any = Union
"""Their arguments are known at run time only."""
_TYPES: Mapping[str, Any] = {"bool": bool, "float": float, "int": int, "str": str, "None": type(None)}


@dataclass(frozen=True)
class Code:
    """A user's modules, as they were when they were read."""

    path: Path = field(compare=False)
    """Of what was named: a module, a package, or a folder of modules and packages."""
    digest: str
    files: Mapping[str, bytes] = field(compare=False, repr=False)
    """Their contents, by path in the folder that modules are imported from."""

    @classmethod
    def read(cls, path: Path) -> Code:
        """Raises ValueError that says what is wrong with `path`."""
        files: dict[str, bytes] = {}
        size = 0
        for name, file in _files(path):
            size += file.stat().st_size
            if size > _MAX_BYTES or len(files) >= _MAX_FILES:
                raise ValueError(
                    f"holds more than {_MAX_FILES} files or {_MAX_BYTES >> 20} MiB, and is copied into "
                    "each run: name a module, or a folder with the code alone"
                )
            files[name] = file.read_bytes()
        for module in {Path(name).parts[0].removesuffix(".py") for name in files if name[-3:] == ".py"}:
            if is_taken(module):
                raise ValueError(
                    f"has a module {module}, and so has Python here: which of the two would be imported "
                    "is not certain, so rename yours"
                )
        if not any(name.endswith(".py") for name in files):
            raise ValueError("has no Python module, expected a .py file, or a folder with some")
        digest = hashlib.sha256()
        for name, content in sorted(files.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return cls(path, digest.hexdigest()[:12], files)

    def copy(self, folder: Path) -> None:
        """Make `folder` one to import the modules from, which all may read."""
        for name, content in self.files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    def stand_in(self, kind: Kind, name: str) -> type[StandIn]:
        """For the class called `name`. Raises ValueError that says what is wrong with that, RaisedError
        where importing it raises."""
        return _stand_in(self, kind, name)

    def ask(self, question: str, kind: Kind, name: str, **facts: Any) -> Any:
        """See `testbed.own_code.inspection`. Raises ValueError with what the class refuses, RaisedError
        with the traceback of what its code raises."""
        request = {"question": question, "kind": kind, "name": name, **facts}
        return _inspector(self).ask(own_code.plain(request))


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
    """Ask `question` about the object that `one` stands for. Raises ValueError with what its class
    refuses; BadInputError, with the traceback, where its code raises."""
    code, kind, name = one.stands_for
    try:
        return code.ask(question, kind, name, params=vars(one), **facts)
    except RaisedError as error:
        raise BadInputError(f"{name} in {code.path} failed:\n{error}") from error


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Path in the folder of modules, and here, of each file of the code; raises ValueError."""
    if path.is_file():
        if path.suffix != ".py":
            raise ValueError("is no Python module, expected a .py file, or a folder with some")
        yield path.name, path
        return
    if not path.is_dir():
        raise ValueError(f"there is no {path}; give the path of a .py file or folder, from this file's")
    root = _root(path)
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and name[0] != ".")
        for name in sorted(names):
            file = Path(folder, name)
            if name[0] != "." and file.suffix != ".pyc" and file.is_file():
                yield str(file.relative_to(root)), file


def _root(path: Path) -> Path:
    """The folder from which the modules at `path` would be imported."""
    return path if path.is_dir() and not (path / "__init__.py").is_file() else path.parent


def is_taken(module: str) -> bool:
    """Whether there is another module of that name on this host."""
    if module in _TAKEN:
        return True
    places = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return importlib.machinery.PathFinder.find_spec(module, places) is not None


@functools.lru_cache(maxsize=8)
def _inspector(code: Code) -> Inspector:
    return Inspector(code.copy, _root(code.path))


@functools.lru_cache(maxsize=64)
def _stand_in(code: Code, kind: Kind, name: str) -> type[StandIn]:
    found = code.ask("class", kind, name)
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
