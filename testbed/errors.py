"""Every error that the testbed raises for its user, in one tree.

    TestbedError            shown as a message without traceback; gives the CLI its exit code
    ├── BadInputError       2: what the user wrote cannot be done: the message names place and mend
    │   └── yamlfile.FaultyFileError   in a file: all that is wrong with it, each with its place
    ├── HostError           1: this machine lacks something: the message names the mending command
    └── RunFailedError      1: a run began and did not end well

Errors of other libraries (docker, yaml, pydantic, OSError) are mapped to these where they enter.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_MAX_NAMED = 12
"""Names that a message lists."""
_NOT_YOURS = "you may not write there; name another place"


class TestbedError(Exception):
    """Something to tell the user, in full sentences; the CLI prints it and exits with `exit_code`."""

    __test__ = False  # not a test class, whatever pytest thinks of its name
    exit_code = 1


class BadInputError(TestbedError):
    exit_code = 2


class HostError(TestbedError):
    pass


class RunFailedError(TestbedError):
    pass


def name_list(names: Sequence[str], most: int = _MAX_NAMED) -> str:
    """`names` for a message, which has room for `most` of them: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def from_os_error(error: OSError, place: Path | None = None) -> HostError:
    """What to tell of an error that the operating system raised. That a disk is full does not say which
    file it is about: then it is about `place`."""
    where, reason = error.filename, error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = where or place
        reason += ". Make room on that disk (df -h), or name a folder on another one (--runs, --to)"
    elif error.errno in (errno.EACCES, errno.EROFS) and where and _is_new(Path(os.fsdecode(where))):
        reason += ". Name a place that you may write to (--runs, --to)"
    return HostError(f"{where}: {reason}" if where else reason)


def _is_new(path: Path) -> bool:
    """Whether `path` would have been made, in a folder that can be entered."""
    return os.access(path.parent, os.X_OK) and not path.exists()


def writable_file(path: Path, option: str = "--to") -> Path:
    """`path`, which the user has named with `option`, if a file can be written there. Raises
    BadInputError, before there is anything to write: that may take long to make."""
    folder = path.absolute().parent
    problem = None
    if os.path.isdir(path):  # noqa: PTH112  (Path's raises PermissionError)
        problem = "this is a folder; name a file in it"
    elif not os.path.isdir(folder):  # noqa: PTH112
        problem = f"there is no folder {path.parent}; make it first"
    elif not _may_write(path if path.exists() else folder):
        problem = _NOT_YOURS
    return _unless(problem, path, option)


def writable_folder(path: Path, option: str = "--to") -> Path:
    """The same of a folder for several files, which is made where it is not there. Raises
    BadInputError."""
    there = next(one for one in (path.absolute(), *path.absolute().parents) if os.path.lexists(one))
    problem = None
    if not os.path.isdir(there):  # noqa: PTH112
        problem = f"{there} is no folder"
    elif not _may_write(there):
        problem = _NOT_YOURS
    return _unless(problem, path, option)


def _unless(problem: str | None, path: Path, option: str) -> Path:
    if problem is not None:
        raise BadInputError(f"{option} {path}: {problem}".strip())
    return path


def _may_write(path: Path) -> bool:
    """Whether this user may write to a file, or make one in a folder."""
    needed = os.W_OK | os.X_OK if path.is_dir() else os.W_OK
    return os.access(path, needed, effective_ids=True)


@contextmanager
def reading_run(run: Path) -> Iterator[None]:
    """Inside, files of the run directory `run` are read and nothing else is done: that one cannot be
    read, or is damaged, is a BadInputError."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        if isinstance(error, OSError):
            reason = str(from_os_error(error))
        raise BadInputError(
            f"{run} cannot be read as a run: {reason}. Mend that file, or leave this run out."
        ) from error
