"""Tasks, rules and the like written by the user, as `module:Class` in a folder of modules
(docs/guide/own-code.md).

Python's import state is global, so a process never uses two such folders at the same time.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from agents.checks import DeclarationError

if TYPE_CHECKING:
    from agents.config import Named

T = TypeVar("T")
HOSTS = {"flower": "agents.tasks.flower:Flower"}
"""Built-in tasks that run user code: planned, copied and inspected like it."""
FAILED = 3
"""Exit code after an error in user code, with whose traceback the log then ends."""
_OURS = {"__main__", "agents", "analysis", "concurrent", "importlib", "testbed"}
"""Top-level modules whose frames are not user code."""
_in_use: list[str] = []
"""The folder in use as the only element, if any."""


def is_user_code(name: str) -> bool:
    """Or a built-in task that runs user code."""
    return ":" in name or name in HOSTS


def use_folder(folder: str | None) -> None:
    """None to import no user code. Modules of the previous folder are unloaded, so that one process can
    run several versions of user code one after the other."""
    if folder is None and not _in_use:
        return  # in a forked process, inspecting each module would copy its memory pages
    # `torch.compile` then returns the module as it is. A device has no compiler, and compiling takes
    # minutes at its CPU share.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    for name, module in list(sys.modules.items()):
        if _lies_in_use(getattr(module, "__file__", None)):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path not in _in_use]
    _in_use[:] = [] if folder is None else [os.path.abspath(folder)]  # noqa: PTH100  (pathlib is not for the cores)
    sys.path[:0] = _in_use  # before the entry for the folder in which the process was started
    importlib.invalidate_caches()


def folder() -> str | None:
    return next(iter(_in_use), None)


def load_attribute(name: str) -> Any:
    """Object `module:name`. Raises LookupError if it does not exist. Errors during the import are passed
    on."""
    module_name, _, last = name.partition(":")
    module = _module(module_name)
    if not hasattr(module, last):
        raise LookupError(f"the module {module_name} has no {last}")
    return getattr(module, last)


def build(named: Named, ours: Mapping[str, type[T]], base: type) -> T:
    """Task or rule of the built-in classes `ours` or of user code. Raises LookupError if it does not
    exist. Errors in user code are passed on."""
    params = as_json_values(named.params) if is_user_code(named.name) else named.params
    return find_class(named.name, ours, base)(**params)


def find_class(name: str, ours: Mapping[str, type[T]], base: type) -> type[T]:
    """`name`: a key of `ours`, or `module:Class` for a dataclass of user code derived from `base`.
    Raises LookupError if there is no such class. Errors during the import of user code are passed on."""
    if not is_user_code(name):
        return ours[name]
    if name in HOSTS:
        host, _, class_name = HOSTS[name].partition(":")
        return cast("type[T]", getattr(importlib.import_module(host), class_name))
    module_name, _, class_name = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), class_name)):
        raise LookupError(f"found {name}, expected module:Class")
    found = getattr(_module(module_name), class_name, None)
    if not isinstance(found, type):
        classes = [
            key
            for key, value in vars(sys.modules[module_name]).items()
            if isinstance(value, type) and value.__module__ == module_name
        ]
        there = f"it has {', '.join(classes)}" if classes else "it has no class"
        raise LookupError(f"the module {module_name} has no class {class_name}; {there}")
    if base not in found.__mro__:
        raise LookupError(
            f"{class_name} is not a {split_words(base.__name__)}: derive it, as in class "
            f"{class_name}({base.__name__}), with from {base.__module__} import {base.__name__}"
        )
    if "__dataclass_fields__" not in vars(found):
        raise LookupError(f"{class_name} is not a dataclass: write @dataclass(frozen=True) above it")
    return cast("type[T]", found)


def split_words(class_name: str) -> str:
    """Words such as `client half` for `ClientHalf`."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", class_name).lower()


def has_module(module: str) -> bool:
    """Return whether `module` is in the folder of user code."""
    return PathFinder.find_spec(module.partition(".")[0], _in_use) is not None


def _module(name: str) -> object:
    """Without writing byte code. Raises LookupError if there is no such module."""
    if not has_module(name):
        raise LookupError(f"the code has no module {name}")
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # a module that user code imports is missing
        raise LookupError(f"the code has no module {name}") from error
    finally:
        sys.dont_write_bytecode = writes
    if not _lies_in_use(module.__file__):
        raise LookupError(f"{name} is also the name of another Python module: rename yours")
    return module


def is_from_user_code(error: BaseException) -> bool:
    """Raised in user code, or in code that it called; or a DeclarationError, which is the fault of the
    rule."""
    return isinstance(error, DeclarationError) or bool(_own_lines(error))


def is_caused_by_user_code(error: BaseException, task: str) -> bool:
    """Raised in user code, or in objects of `task`, such as torch layers of its model, which are
    recognised by the notes that the testbed adds to their errors."""
    return is_from_user_code(error) or (is_user_code(task) and hasattr(error, "__notes__"))


def error_place(error: BaseException) -> str:
    """Line of user code, such as " (mlp.py, line 12)"; empty if user code did not raise the error."""
    return "".join(f" ({file}, line {number})" for file, number in _own_lines(error)[-1:])


def user_traceback(error: BaseException) -> str:
    """Without the testbed's frames before the first frame of user code or of an object that it made."""
    start = error.__traceback__
    own = is_from_user_code(error)
    while start is not None and not _begins(start.tb_frame, own=own):
        start = start.tb_next
    lines = traceback.format_exception(type(error), error, start)
    return "".join(lines).rstrip()


@contextmanager
def exit_if_user_code_fails(name: str) -> Iterator[None]:
    """Context manager for calls of the task or rule `name`. If the task or rule is user code and raises
    an error, the process ends with the error's traceback and the exit code FAILED."""
    try:
        yield
    except Exception as error:
        if not is_user_code(name):
            raise
        sys.stderr.write(f"{user_traceback(error)}\n")
        sys.exit(FAILED)


def as_json_values(value: Any) -> Any:
    """Return `value` in the form in which user code receives it in every runtime: JSON types, with lists
    instead of tuples."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return as_json_values(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {key: as_json_values(inner) for key, inner in value.items()}
    return [as_json_values(inner) for inner in value] if isinstance(value, list | tuple) else value


def _begins(frame: FrameType, *, own: bool) -> bool:
    """The shown part of a traceback begins with `frame`: if `own`, the first of user code, else the
    first of a module outside `_OURS`."""
    top = str(frame.f_globals.get("__name__")).partition(".")[0]
    return is_own_frame(frame) if own else top not in _OURS


def is_own_frame(frame: FrameType) -> bool:
    return _lies_in_use(frame.f_code.co_filename)


def _lies_in_use(file: str | None) -> bool:
    return file is not None and any(file.startswith(f"{folder}/") for folder in _in_use)


def _own_lines(error: BaseException) -> list[tuple[str, int]]:
    """File and line number of each frame of user code, outermost first."""
    return [
        (frame.f_code.co_filename.removeprefix(f"{folder()}/"), number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if is_own_frame(frame)
    ]
