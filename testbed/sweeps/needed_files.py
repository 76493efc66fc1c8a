"""Files that a cell reads and that are not sent to a worker of a cluster: the data, and the files that
the topology names. Each worker has them on its own disk, or on a shared file system.

The worker compares their checksums with the checksums of the files of the machine that runs the sweep.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from agents.disk import files
from agents.disk.checksum import Checksum
from testbed.data import data_files, datasets
from testbed.topology import Topology

_CHUNK = 2**20


class NeededFile(msgspec.Struct, frozen=True):
    path: str
    """Absolute path; for a file in the data root, relative to it."""
    in_data_root: bool
    checksum: int


def find(topology: Topology, data_root: Path | None) -> tuple[NeededFile, ...]:
    """`data_root`: folder of the datasets. Data that is downloaded from the hub is left out. Raises
    BadInputError, OSError."""
    found = [_needed(Path(path), None) for path in _named_files(topology)]
    chosen = datasets.source(topology)
    if isinstance(chosen, datasets.Columns):
        with datasets.located_errors(topology):
            splits = data_files.local_splits(chosen.data, data_root)
        root = None if chosen.data.path is not None else data_root
        found += [_needed(path, root) for path in (splits.files if splits else ())]
    return tuple(found)


def problem(needed: Iterable[NeededFile], data_root: Path | None) -> str | None:
    """`data_root`: as in `find`, on this machine."""
    for one in needed:
        if one.in_data_root and data_root is None:
            return (
                "has no data: copy the data to the same folder there, or start the worker with "
                "TESTBED_DATA=FOLDER"
            )
        path = (data_root or Path()) / one.path if one.in_data_root else Path(one.path)
        try:
            same = _checksum(path.resolve()) == one.checksum
        except OSError as error:
            return f"cannot read {path} ({error.strerror}): copy the file to that folder there"
        if not same:
            return f"has another content in {path} than this machine: copy the file there"
    return None


def local_data_root(data_root: Path | None) -> Path | None:
    """The folder `data_root` if this machine has it, otherwise the folder in the environment variable
    TESTBED_DATA, if it exists."""
    if data_root is not None and data_root.is_dir():
        return data_root
    own = os.environ.get("TESTBED_DATA")
    return Path(own) if own and Path(own).is_dir() else None


def _named_files(topology: Topology) -> Iterator[str]:
    """The user's code is left out, because it is sent to the worker, and so are data files, because the
    data's format says which are read."""
    keys = topology.model_dump(mode="json", exclude={"code": True, "task": {"data"}})
    # Reading a topology makes all paths in it absolute.
    yield from sorted({text for text in _strings(keys) if text[:1] == "/" and os.path.isfile(text)})  # noqa: PTH113


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        for one in value:
            yield from _strings(one)


def _needed(path: Path, root: Path | None) -> NeededFile:
    name = str(path.absolute() if root is None else path.relative_to(root))
    return NeededFile(name, root is not None, _checksum(path.resolve()))


def _checksum(path: Path) -> int:
    stat = path.stat()
    return _content_checksum(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=10_000)
def _content_checksum(path: Path, _size: int, _modified: int) -> int:
    found = Checksum()
    with files.open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.intdigest()
