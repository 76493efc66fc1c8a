"""Files of a sweep: those kept in its folder, with which it can be run again, and those that its cells
read."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from agents.disk import files
from agents.disk.files import Checksum
from testbed.data import data_files, datasets
from testbed.errors import BadInputError
from testbed.plan.host import FILE as MEASURED
from testbed.sweeps import Sweep
from testbed.topology import Topology, profiles, units, yamlfile
from testbed.topology.profiles import FILE as PROFILES
from testbed.topology.profiles import Profiles
from testbed.topology.schema import FLEET

# The sweep's file and topology in the sweep's folder, with which the sweep can be run again.
#
# Paths in the copies are absolute, except for the user's own code, of which there is a copy beside them.
# They have a folder of their own, so that no file of the user is replaced if a sweep's folder is the
# user's.

KEPT_FOLDER = "sweep"
"""Folder in the sweep's folder."""
FILE = "sweep.yaml"
TOPOLOGY = "topology.yaml"
KEPT_BESIDE = (PROFILES, MEASURED, FLEET)
"""Files beside the topology that planning reads."""
LOCK = ".lock"
"""File that is locked while the sweep is executed."""
_CODE = "code"


def keep_sweep(sweep: Sweep, folder: Path) -> None:
    made = Path(tempfile.mkdtemp(prefix=f".{KEPT_FOLDER}-", dir=folder))
    try:
        made.chmod(0o755)
        _write(sweep, made)
        target = folder / KEPT_FOLDER
        if (target / FILE).is_file():
            shutil.rmtree(target)
        made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write(sweep: Sweep, folder: Path) -> None:
    base = Path(sweep.base.source.name).parent.absolute()
    names: dict[str, str] = {}
    for cell in sweep.cells:
        code = cell.topology.user_code
        if code is not None and str(code.path) not in names:
            names[str(code.path)] = name = f"{_CODE}-{len(names) + 1}" if names else _CODE
            code.copy(folder / name)

    def change(key: str, text: str) -> str | None:
        path = str(base / text)
        if key == _CODE:
            return names.get(path)
        if text in profiles.population_names() or not (base / text).exists():
            return None
        return path

    study = yamlfile.replace_paths(sweep.document.data, change) | {"topology": TOPOLOGY}
    (folder / FILE).write_text(yamlfile.write(study), encoding="utf-8")
    topology = yamlfile.write(yamlfile.replace_paths(sweep.base.data, change))
    (folder / TOPOLOGY).write_text(topology, encoding="utf-8")
    devices = {name: one for cell in sweep.cells for name, one in cell.plan.profiles.devices.items()}
    links = {name: one for cell in sweep.cells for name, one in cell.plan.profiles.links.items()}
    if devices or links:
        found = Profiles(devices=devices, links=links).model_dump(mode="json", exclude_defaults=True)
        (folder / PROFILES).write_text(yamlfile.write(found), encoding="utf-8")
    for name in (MEASURED, FLEET):
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)


def kept_target(folder: Path) -> float | None:
    """Raises BadInputError."""
    path = folder / KEPT_FOLDER / FILE
    if not path.is_file():
        return None
    data = yamlfile.read(path).data
    value = data.get("target") if isinstance(data, dict) else None
    try:
        return None if value is None else units.share_as_typed(value)
    except ValueError as error:
        raise BadInputError(f"{path}: target: {error}") from error


def check_not_running(folder: Path) -> None:
    """Raises BadInputError."""
    path = folder / LOCK
    if not path.is_file():
        return
    with files.open_regular(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            raise BadInputError(f"a sweep is running in {folder}: wait until it has ended") from None


# Files that a cell reads and that are not sent to a worker of a cluster: the data, and the files that
# the topology names. Each worker has them on its own disk, or on a shared file system.
#
# The worker compares their checksums with the checksums of the files of the machine that runs the sweep.

_CHUNK = 2**20


class NeededFile(msgspec.Struct, frozen=True):
    path: str
    """Absolute path; for a file in the data root, relative to it."""
    in_data_root: bool
    checksum: int


def find_needed(topology: Topology, data_root: Path | None) -> tuple[NeededFile, ...]:
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


def problem_of_needed(needed: Iterable[NeededFile], data_root: Path | None) -> str | None:
    """`data_root`: as in `find_needed`, on this machine."""
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
