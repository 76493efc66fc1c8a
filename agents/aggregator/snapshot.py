"""File of a checkpoint: the aggregator's state as a pickle, with vectors as raw bytes.

The state is a graph of objects that refer to each other (the core, its rule, and the server that both
use), which pickle preserves. When a file is read, `_Reader` allows only classes of the modules in
`_MODULES`, of the run's user code, and NumPy's arrays and generators. So a forged file cannot run code
from elsewhere.

Layout: `_HEAD` (magic number, length of the pickle, number of buffers, checksum of the rest), the
lengths of the buffers, the pickle, the buffers. Integers are little endian.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

from agents import user_code
from agents.disk import checksum, files
from agents.rules import RULES
from agents.selection import SELECTIONS

_HEAD = struct.Struct("<8sQQQ")
_MAGIC = b"testbed9"
"""Version of the state's classes. Change it whenever one of them changes."""
_MODULES = {
    "agents.aggregator.arrivals",
    "agents.aggregator.core",
    "agents.aggregator.dispatches",
    "agents.aggregator.ending",
    "agents.aggregator.evaluations",
    "agents.aggregator.intake",
    "agents.aggregator.membership",
    "agents.aggregator.outgoing",
    "agents.aggregator.progress",
    "agents.aggregator.reports",
    "agents.aggregator.run_phase",
    "agents.aggregator.losses",
    "agents.aggregator.sending",
    "agents.aggregator.settings",
    "agents.aggregator.timers",
    "agents.aggregator.validation",
    "agents.aggregator.versions",
    "agents.models.buffers",
    "agents.config",
    "agents.device_actions",
    "agents.events",
    "agents.mqtt.rate_limit",
    "agents.pipeline",
    "agents.rules.client_half",
    "agents.rules.interface",
    "agents.rules.parts",
    "agents.selection.draws",
    "agents.selection.interface",
    *(rule.__module__ for rule in RULES.values()),
    *(selection.__module__ for selection in SELECTIONS.values()),
}
"""Modules whose classes a state may contain: making their objects has no side effects."""
_OTHERS = {
    ("agents.aggregator.durable", "DurableState"),
    ("builtins", "set"),
    ("collections", "Counter"),
    ("collections", "deque"),
    ("functools", "partial"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.random._pickle", "__bit_generator_ctor"),
    ("numpy.random._pickle", "__generator_ctor"),
    ("numpy.random._pcg64", "PCG64"),
    ("numpy.random.bit_generator", "SeedSequence"),
    ("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence"),
}


_UNREADABLE = (
    *(struct.error, pickle.UnpicklingError, EOFError, MemoryError, OverflowError),
    *(AttributeError, LookupError, TypeError, ValueError),
)
"""May be raised by a damaged file."""


class SnapshotError(Exception):
    """The message says why the state cannot be restored."""


def save(state: object, path: Path) -> int:
    """Write atomically, and flush to the disk; return the size in bytes."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(state, protocol=5, buffer_callback=buffers.append)
    raw = [one.raw() for one in buffers]
    lengths = struct.pack(f"<{len(raw)}Q", *map(len, raw))
    head = _HEAD.pack(_MAGIC, len(pickled), len(raw), checksum.checksum_of(lengths, pickled, *raw))
    with files.atomic_write(path) as partial, files.open_private(partial, "wb") as file:
        file.write(head + lengths + pickled)
        for buffer in raw:
            file.write(buffer)
        file.flush()
        os.fdatasync(file.fileno())
        size = file.tell()
    files.sync_folder(path.parent)  # the file's name must be on the disk, too
    return size


def check(path: Path) -> None:
    """Raise SnapshotError if the file was not written by this version of the testbed, by its magic
    number. Raises OSError."""
    with files.open_regular(path) as file:
        _check_magic(path, file.read(len(_MAGIC)))


def _check_magic(path: Path, magic: bytes) -> None:
    if magic != _MAGIC:
        ours = magic.startswith(_MAGIC[:-1])
        other = "was written by another version of the testbed: resume the run with that one"
        raise SnapshotError(f"{path} {other if ours else 'is not a checkpoint'}")


def load(path: Path) -> Any:
    """Vectors are writable. Raises OSError, SnapshotError."""
    try:
        with files.open_regular(path) as file:
            magic, size, count, summed = _HEAD.unpack(file.read(_HEAD.size))
            _check_magic(path, magic)
            head = file.read(8 * count)
            lengths = struct.unpack(f"<{count}Q", head)
            if file.tell() + size + sum(lengths) != os.fstat(file.fileno()).st_size:
                raise SnapshotError(f"{path} is incomplete")
            pickled = file.read(size)
            buffers = [_read(file, length) for length in lengths]
            if checksum.checksum_of(head, pickled, *buffers) != summed:
                raise SnapshotError(f"{path} is damaged: its checksum is wrong")
            return _Reader(pickled, buffers).load()
    except _UNREADABLE as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from error


def _read(file: BinaryIO, length: int) -> bytearray:
    buffer = bytearray(length)
    cast(BufferedReader, file).readinto(buffer)
    return buffer


class _Reader(pickle.Unpickler):
    def __init__(self, pickled: bytes, buffers: Sequence[bytearray]) -> None:
        super().__init__(io.BytesIO(pickled), buffers=buffers)

    def find_class(self, module: str, name: str) -> Any:
        ours = module in _MODULES or module.startswith("agents.pipeline.")
        if ours or (module, name) in _OTHERS or user_code.has_module(module):
            found = super().find_class(module, name)
            if (module, name) in _OTHERS or (isinstance(found, type) and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no state contains")
