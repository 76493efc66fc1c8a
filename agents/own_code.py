"""Tasks and rules of a user's own: `module:Class`, from a folder of modules (docs/guide/own-code.md).

Python's imports have one state for the whole process, and so there is one such folder at a time.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from agents.config import Named

T = TypeVar("T")
HOSTS = {"flower": "agents.tasks.flower:Flower"}
"""Tasks of ours that consist of own code: they are planned, copied and looked at as that is."""
FAILED = 3
"""Exit code of a process that own code has ended, with its traceback as the last thing in the log."""
_OURS = {"__main__", "agents", "analysis", "concurrent", "importlib", "testbed"}
"""Top-level modules whose frames lead to own code, and are none of it."""
_in_use: list[str] = []
"""The folder, if there is one."""


def is_own(name: str) -> bool:
    """Whether `name` is that of own code, and not one of ours."""
    return ":" in name or name in HOSTS


def use(folder: str | None) -> None:
    """Import own code from `folder` from now on; what came from another one is forgotten, so that a
    process can run one version after the other."""
    if folder is None and not _in_use:
        return  # in a process that was forked, a look at each module copies its page of memory
    for name, module in list(sys.modules.items()):
        if _lies_in_use(getattr(module, "__file__", None)):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path not in _in_use]
    _in_use[:] = [] if folder is None else [folder]
    sys.path[:0] = _in_use  # before the folder that the process was started in
    importlib.invalidate_caches()


def folder() -> str | None:
    """The one in use."""
    return next(iter(_in_use), None)


def attribute(name: str) -> Any:
    """What `module:name` of own code is. Raises LookupError where there is none, and what importing it
    raises."""
    module_name, _, last = name.partition(":")
    module = _module(module_name)
    if not hasattr(module, last):
        raise LookupError(f"the module {module_name} has no {last}")
    return getattr(module, last)


def build(named: Named, ours: Mapping[str, type[T]], base: type) -> T:
    """The task or rule that `named` describes, one of `ours` or of own code. Raises LookupError where
    there is none, and what own code raises."""
    params = plain(named.params) if is_own(named.name) else named.params
    return find(named.name, ours, base)(**params)


def find(name: str, ours: Mapping[str, type[T]], base: type) -> type[T]:
    """The class called `name`: a key of `ours`, or a dataclass of own code that is derived from `base`.
    Raises LookupError, and what importing own code raises."""
    if not is_own(name):
        return ours[name]
    if name in HOSTS:
        host, _, attribute = HOSTS[name].partition(":")
        return cast("type[T]", getattr(importlib.import_module(host), attribute))
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise LookupError(f"{name} is no class, expected module:Class")
    found = getattr(_module(module_name), attribute, None)
    if not isinstance(found, type):
        classes = [
            key
            for key, value in vars(sys.modules[module_name]).items()
            if isinstance(value, type) and value.__module__ == module_name
        ]
        there = f"it has {', '.join(classes)}" if classes else "it has no class"
        raise LookupError(f"the module {module_name} has no class {attribute}; {there}")
    if base not in found.__mro__:
        raise LookupError(
            f"{attribute} is no {base.__name__.lower()}: derive it, as in class "
            f"{attribute}({base.__name__}), with from {base.__module__} import {base.__name__}"
        )
    if "__dataclass_fields__" not in vars(found):
        raise LookupError(f"{attribute} is no dataclass: write @dataclass(frozen=True) above it")
    return cast("type[T]", found)


def provides(module: str) -> bool:
    """Whether `module` is one of the folder's."""
    return PathFinder.find_spec(module.partition(".")[0], _in_use) is not None


def _module(name: str) -> object:
    """The own module `name`, imported; no byte code is left beside it."""
    if not provides(name):
        raise LookupError(f"the code has no module {name}")
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # one that the code imports
        raise LookupError(f"the code has no module {name}") from error
    finally:
        sys.dont_write_bytecode = writes
    if not _lies_in_use(module.__file__):
        raise LookupError(f"{name} is the name of another module of Python's: rename yours")
    return module


def raised(error: BaseException) -> bool:
    """Whether `error` comes from within own code."""
    return bool(_own_lines(error))


def caused(error: BaseException, task: str) -> bool:
    """Whether own code is to blame for `error`: it comes from within that, or from what runs of the own
    task `task`, such as a model of torch's layers, which our notes name."""
    return raised(error) or (is_own(task) and hasattr(error, "__notes__"))


def place(error: BaseException) -> str:
    """The line of own code that `error` comes from, such as " (mlp.py, line 12)"; empty where there is
    none."""
    return "".join(f" ({file}, line {number})" for file, number in _own_lines(error)[-1:])


def told(error: BaseException) -> str:
    """The traceback of `error` without those of our frames that led into own code, or into what own
    code has made."""
    start = error.__traceback__
    own = raised(error)
    while start is not None and not _begins(start.tb_frame, own=own):
        start = start.tb_next
    lines = traceback.format_exception(type(error), error, start)
    return "".join(lines).rstrip()


@contextmanager
def running(name: str) -> Iterator[None]:
    """Inside runs what the task `name` consists of: where that is own code, what it raises ends the
    process with its traceback and the exit code FAILED."""
    try:
        yield
    except Exception as error:
        if not is_own(name):
            raise
        sys.stderr.write(f"{told(error)}\n")
        sys.exit(FAILED)


def plain(value: Any) -> Any:
    """`value` as own code gets it in every runtime: as JSON has it, with lists for tuples."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _begins(frame: FrameType, *, own: bool) -> bool:
    """Whether what is shown begins with `frame`."""
    top = str(frame.f_globals.get("__name__")).partition(".")[0]
    return _is_own_frame(frame) if own else top not in _OURS


def _is_own_frame(frame: FrameType) -> bool:
    return _lies_in_use(frame.f_code.co_filename)


def _lies_in_use(file: str | None) -> bool:
    return file is not None and any(file.startswith(f"{folder}/") for folder in _in_use)


def _own_lines(error: BaseException) -> list[tuple[str, int]]:
    """Files in the folder and line numbers, outermost first, of own code that `error` went through."""
    return [
        (frame.f_code.co_filename.removeprefix(f"{folder()}/"), number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if _is_own_frame(frame)
    ]
