"""A user's own tasks, rules and selections, as the controller sees them (docs/guide/own-code.md): their
files, the client of the process that imports them (`inspection_process`), and stand-ins: dataclasses
with the same parameters, without the user's code.

Topologies are checked against the stand-ins, and the plan gets its facts from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import GenericAlias
from typing import IO, Annotated, Any, ClassVar, Literal, Union, get_args

import numpy as np

from agents import shards, user_code
from agents.rules.interface import ClientSide, Sums
from agents.shards import Shard
from agents.tasks.interface import Splits
from testbed import bundle
from testbed.errors import BadInputError
from testbed.host import processes, programs

_MAX_BYTES = 16 * 2**20
_MAX_FILES = 1000


@dataclass(frozen=True)
class UserCode:
    """A user's modules when they were read."""

    path: Path = field(compare=False)
    """The user gave it: a module, a package, or a folder of modules and packages."""
    digest: str
    """First 12 hexadecimal digits of the SHA-256 of the files."""
    files: Mapping[str, bytes] = field(compare=False, repr=False)
    """Contents by path, relative to the import folder (`import_folder`)."""

    @classmethod
    def read(cls, path: Path) -> UserCode:
        """Raises ValueError with a message that says what is wrong with the code."""
        files: dict[str, bytes] = {}
        size = 0
        for name, file in _files(path):
            size += file.stat().st_size
            if size > _MAX_BYTES or len(files) >= _MAX_FILES:
                raise ValueError(
                    f"has more than {_MAX_FILES} files or {_MAX_BYTES >> 20} MiB, but is copied into "
                    "each run: name a module, or a folder with only the code"
                )
            files[name] = file.read_bytes()
        for module in {Path(name).parts[0].removesuffix(".py") for name in files if name[-3:] == ".py"}:
            if bundle.is_taken(module):
                raise ValueError(
                    f"has a module {module}, a name that Python already uses on this host: rename "
                    "yours, or the wrong one may be imported"
                )
        if not any(name.endswith(".py") for name in files):
            raise ValueError("has no Python module, expected a .py file, or a folder with .py files")
        digest = hashlib.sha256()
        for name, content in sorted(files.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return cls(path, digest.hexdigest()[:12], files)

    def copy(self, folder: Path) -> None:
        """The modules can be imported from `folder`. All users may read the files."""
        for name, content in self.files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the path relative to the import folder, and the path on this host. Raises ValueError."""
    if path.is_file():
        if path.suffix != ".py":
            raise ValueError("is not a Python module, expected a .py file, or a folder with .py files")
        yield path.name, path
        return
    if not path.is_dir():
        raise ValueError(f"{path} does not exist; give a .py file or folder, relative to this file")
    root = import_folder(path)
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and name[0] != ".")
        for name in sorted(names):
            file = Path(folder, name)
            if name[0] != "." and file.suffix != ".pyc" and file.is_file():
                yield str(file.relative_to(root)), file


def import_folder(path: Path) -> Path:
    """Folder that Python must search to import the modules at `path`."""
    return path if path.is_dir() and not (path / "__init__.py").is_file() else path.parent


# Client of the process that imports a user's code (`testbed.user_code.inspection_process`).
#
# The code runs only in that process, not in the controller. The process ends when it gets no question
# for some seconds, and when the controller ends. The next question starts a new process. Each question
# has a time limit. Only the end of the text that the code prints is kept.

_PREFIX = "testbed-code-"
_PATIENCE_S = 120.0
"""Limit for one answer. It is long, because importing PyTorch alone takes seconds, and longer on a busy
host."""
_DATASET_PATIENCE_S = 3600.0
"""A dataset may have to be downloaded and decoded."""
_MAX_ANSWER = 4 * 2**20
"""Bytes of one answer."""
_KEPT = 4000
"""Bytes of the text that the code prints: the latest are kept."""


class RaisedError(Exception):
    """The text is the traceback of the user's code."""


class Inspector:
    """One for each version of a user's modules.

    `copy`: function that writes the modules into a folder. `origin`: folder with the user's own files.
    Errors show paths in this folder.
    """

    def __init__(self, copy: Callable[[Path], None], origin: Path) -> None:
        remove_leftovers()
        self._folder, lock = _locked_folder()
        weakref.finalize(self, _remove, self._folder, lock)
        self._origin = origin
        copy(self._folder / "code")
        self._process: _Process | None = None
        self._known: dict[str, dict[str, Any]] = {}
        """Answers, by question. They stay valid, because the code does not change."""

    def ask(self, request: dict[str, Any]) -> Any:
        """Raises ValueError if the code refuses the request, RaisedError if the code raises, and
        BadInputError if there is no answer."""
        line = json.dumps(request)
        if line not in self._known:
            patience = _DATASET_PATIENCE_S if request["question"] == "dataset" else _PATIENCE_S
            self._known[line] = self._answer(line, request["name"], patience)
        match self._known[line]:
            case {"answer": answer}:
                return answer
            case {"refused": message}:
                raise ValueError(message)
            case {"raised": text}:  # name the user's files, not their copies
                raise RaisedError(text.replace(str(self._folder / "code"), str(self._origin)))
        raise AssertionError(self._known[line])

    def _answer(self, line: str, name: str, patience: float) -> dict[str, Any]:
        printed = ""
        for _ in range(2):  # the process may just have ended because it had no questions
            if self._process is None or not self._process.is_alive:
                self._process = _Process(self._folder)
            if (answer := self._process.answer(line, patience)) is not None:
                found: dict[str, Any] = json.loads(answer)
                return found
            self._process.end()
            printed = self._process.printed()
        raise BadInputError(f"{name} in {self._origin}: its process ended without an answer\n{printed}")


def remove_leftovers() -> None:
    """Remove the copies of user code that killed controllers have left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or in use
            lock = _lock(folder)
            _remove(folder, lock)


def _locked_folder() -> tuple[Path, int]:
    """Return the path, and the descriptor of a lock that lasts as long as this process. The folder gets
    its name once it is locked, so that `remove_leftovers` cannot remove it before."""
    made = Path(tempfile.mkdtemp(prefix="testbed-")).resolve()
    lock = _lock(made)
    return made.rename(made.with_name(_PREFIX + made.name.removeprefix("testbed-"))), lock


def _lock(folder: Path) -> int:
    """Return the descriptor. Raises OSError if another process has locked `folder`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


class _Process:
    def __init__(self, folder: Path) -> None:
        module = programs.command("testbed.user_code.inspection_process", str(folder))
        self._popen = subprocess.Popen(
            [*programs.tied_prefix(), *module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal reaches only the controller, which ends it
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # no byte code next to the user's files
        )
        self.end = weakref.finalize(self, _end, self._popen)
        self._printed = bytearray()
        printed = self._popen.stderr, self._printed
        self._reader = threading.Thread(target=_drain, args=printed, daemon=True)
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def answer(self, line: str, patience: float) -> bytes | None:
        """None if the process has ended. Raises BadInputError if there is no answer within `patience`
        seconds."""
        assert self._popen.stdin is not None  # noqa: S101  (pipes, see above)
        assert self._popen.stdout is not None  # noqa: S101
        try:
            self._popen.stdin.write(line.encode() + b"\n")
            self._popen.stdin.flush()
            return self._read(self._popen.stdout.fileno(), patience)
        except BrokenPipeError:
            return None
        except BaseException:  # a late answer must not be read as the answer to a later question
            self.end()
            raise

    def _read(self, descriptor: int, patience: float) -> bytes | None:
        deadline, data = time.monotonic() + patience, bytearray()
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                raise BadInputError(
                    f"your code did not answer within {patience:g} s: do no slow work when a module is "
                    f"imported, or when the model or dataset is made\n{self.printed()}"
                )
            if select.select([descriptor], [], [], left)[0]:
                if not (chunk := os.read(descriptor, 65536)):
                    return None
                data += chunk
            if len(data) > _MAX_ANSWER:
                raise BadInputError(
                    f"what your code says of itself has more than {_MAX_ANSWER:,} bytes: use fewer or "
                    "shorter names and texts"
                )
        return bytes(data)

    def printed(self) -> str:
        """Last lines, indented."""
        if not self.is_alive:
            self._reader.join(1)
        lines = bytes(self._printed).decode(errors="replace").splitlines()[-15:]
        return "\n".join(f"    {line}" for line in lines)


def _drain(stream: IO[bytes], printed: bytearray) -> None:
    with stream:
        while chunk := os.read(stream.fileno(), 65536):
            printed += chunk
            del printed[:-_KEPT]


def _end(process: subprocess.Popen[bytes]) -> None:
    processes.end(process)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


Kind = Literal["task", "rule", "selection"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_LITERAL: Any = Literal
_UNION: Any = Union
"""Names for arguments that are known at run time only."""
_TYPES: Mapping[str, Any] = {"bool": bool, "float": float, "int": int, "str": str, "None": type(None)}


class StandIn:
    """Stand-in for an object of a user's class: a dataclass with the same parameters."""

    stands_for: ClassVar[tuple[UserCode, Kind, str]]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __post_init__(self) -> None:
        """Take the facts of the user's object over as attributes. Raises ValueError if its class refuses
        the parameters."""
        for name, value in ask(self, "facts").items():
            object.__setattr__(self, name, value)

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

    assumes_uniform: str
    draws: bool
    takes_fednova: bool
    keeps_bases: bool
    _client_side: dict[str, Any]
    """Fields of the rule's client side."""
    _sums: dict[str, Any]
    """Fields of the result of `sums`, or the reason why there is none."""

    @property
    def client_side(self) -> ClientSide:
        return ClientSide(**self._client_side)

    def sums(self) -> Sums:
        if "reason" in self._sums:
            raise ValueError(self._sums["reason"])
        return Sums(**self._sums)


class SelectionStandIn(StandIn):
    """Stand-in for an `agents.selection.interface.ClientSelection`, without its methods."""

    needs_loss: bool
    needs_battery: bool


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
        params = {each.name: getattr(one, each.name) for each in dataclasses.fields(one)}
        return _ask(code, question, kind, name, params=params, **facts)
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
