"""All errors that the testbed raises for its user.

    TestbedError            shown as a message without traceback; has the exit code of the command line
    ├── BadInputError       2: the input is wrong; the message names the place and the fix
    │   └── yamlfile.FaultyFileError   all errors in a file, each with its place
    ├── HostError           1: this machine lacks something; the message names the command that fixes it
    └── RunFailedError      1: a run began and did not finish as planned

Errors of other libraries (docker, yaml, pydantic, OSError) are converted where they occur.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agents.texts import make_printable

_MAX_MESSAGE = 10_000
"""Maximum number of characters of an error."""
_NOT_YOURS = "you may not write there; name another place"


class TestbedError(Exception):
    """Base of all errors for the user: a message in full sentences. The command line prints it and exits
    with `exit_code`. Control characters in it, which come from files and devices, are escaped."""

    __test__ = False  # pytest takes classes called Test… for tests
    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(make_printable(message, _MAX_MESSAGE, keep="\n"))


class BadInputError(TestbedError):
    """The user's input is wrong: a file, an option, an argument."""

    exit_code = 2


class HostError(TestbedError):
    """This machine lacks something that is needed, or an operation of the system failed."""


class RunFailedError(TestbedError):
    """A run began and did not finish as its topology says."""


def from_os_error(error: OSError, place: Path | None = None) -> HostError:
    """The message has advice. It names `place` if the error itself has no file name, as when a disk is
    full."""
    where, reason = error.filename, error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = where or place
        reason += free_space(os.fsdecode(where)) if where else ""
        reason += ". Make room there, or name a folder on another disk (--runs, --to)"
    elif error.errno == errno.EFBIG:
        where = where or place
        reason += ". Raise the limit of this shell (ulimit -f)"
    elif error.errno == errno.ENOENT and not where and not _has_working_folder():
        reason = "The folder that you are in was removed. Change to another folder (cd)"
    elif error.errno in (errno.EACCES, errno.EROFS) and where and _is_new(Path(os.fsdecode(where))):
        reason += ". Name a place that you may write to (--runs, --to)"
    return HostError(f"{where}: {reason}" if where else reason)


def free_space(place: Path | str) -> str:
    """` (0.0 MiB free)` on the disk with `place`; empty if unknown."""
    there = next(one for one in Path(place).absolute().parents if one.exists())
    with suppress(OSError):
        return f" ({shutil.disk_usage(there).free / 2**20:,.1f} MiB free)"
    return ""


def _has_working_folder() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _is_new(path: Path) -> bool:
    return os.access(path.parent, os.X_OK) and not path.exists()


def writable_file(path: Path, option: str = "--to") -> Path:
    """Raises BadInputError, which names `option`, if no file can be written there. Call this before the
    content is computed, because the computation may take long."""
    folder = path.absolute().parent
    problem = None
    if os.path.isdir(path):  # noqa: PTH112  (Path's raises PermissionError)
        problem = "this is a folder; name a file in it"
    elif not os.path.isdir(folder):  # noqa: PTH112
        problem = f"there is no folder {path.parent}; make it first"
    elif not _may_write(path if path.exists() else folder):
        problem = _NOT_YOURS
    return _raise_problem(problem, path, option)


def writable_folder(path: Path, option: str = "--to") -> Path:
    """Raises BadInputError, which names `option`, if no folder can be created there."""
    there = next(one for one in (path.absolute(), *path.absolute().parents) if os.path.lexists(one))
    problem = None
    if not os.path.isdir(there):  # noqa: PTH112
        problem = f"{there} is not a folder"
    elif not _may_write(there):
        problem = _NOT_YOURS
    return _raise_problem(problem, path, option)


def _raise_problem(problem: str | None, path: Path, option: str) -> Path:
    if problem is not None:
        raise BadInputError(f"{option} {path}: {problem}".strip())
    return path


def _may_write(path: Path) -> bool:
    """`path`: a file, or a folder in which a file is created."""
    needed = os.W_OK | os.X_OK if path.is_dir() else os.W_OK
    return os.access(path, needed, effective_ids=True)


@contextmanager
def reading_run(run: Path) -> Iterator[None]:
    """Convert errors of a missing or damaged file to BadInputError. Use this context only around code
    that only reads the run."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        if isinstance(error, OSError):
            reason = str(from_os_error(error))
        raise BadInputError(
            f"{run} cannot be read as a run: {reason}. Repair that file, or leave this run out."
        ) from error
