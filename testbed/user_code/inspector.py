"""A user's code as files, and the client of the process that imports it
(`testbed.user_code.inspection_process`)."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from testbed.errors import BadInputError
from testbed.host import die_with_parent, run_module, subprocesses

_MAX_BYTES = 16 * 2**20
_MAX_FILES = 1000
_TAKEN = sys.stdlib_module_names | {"agents", "analysis", "testbed"}


@dataclass(frozen=True)
class UserCode:
    """A user's modules when they were read."""

    path: Path = field(compare=False)
    """The user gave it: a module, a package, or a folder of modules and packages."""
    digest: str
    """First 12 hexadecimal digits of the SHA-256 of the files."""
    files: Mapping[str, bytes] = field(compare=False, repr=False)
    """By path relative to the import folder (`import_folder`)."""

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
            if is_taken(module):
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


def is_taken(module: str) -> bool:
    """Whether this host has another module of this name."""
    if module in _TAKEN:
        return True
    places = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return importlib.machinery.PathFinder.find_spec(module, places) is not None


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
        module = run_module.command("testbed.user_code.inspection_process", str(folder))
        self._popen = subprocess.Popen(
            [*die_with_parent.prefix(), *module],
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
    subprocesses.end(process)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
