"""Files that the aggregator writes: the journal (`events.jsonl`), models, and checkpoints."""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import pickle
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from agents import events, features, user_code
from agents.disk import files
from agents.disk.files import Checksum
from agents.models.vectors import Buffers, Vector
from agents.rules import RULES
from agents.wire import payloads

BLOCK = 4096
"""Each write to a direct file must end at a multiple of this number of bytes."""
_WRITTEN_PIECE = 2**20
"""Bytes per write, which fit into the processor's cache."""


class AppendedFile:
    """Writer of a file from byte `begin` on, over what was there. The file is created if it is missing,
    and only this user may read it.

    `direct`: write around the page cache, which takes half of the time if the disk is waited for. Each
    `write` must then end at a multiple of `BLOCK`. A file system that cannot do this is written to in
    the usual way.
    """

    def __init__(self, path: Path, begin: int = 0, *, direct: bool) -> None:
        self._fd = files.create_private(path)
        self._at = begin
        self._buffer: mmap.mmap | None = None
        """Begins at a page, as the kernel demands of a direct file."""
        if direct:
            self._buffer = mmap.mmap(-1, _WRITTEN_PIECE)
            with suppress(OSError):
                self._set_direct(on=True)

    def truncate(self) -> None:
        """Remove all bytes after those that were written."""
        os.truncate(self._fd, self._at)

    def write(self, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        """Append the concatenation of `pieces`."""
        if self._buffer is None:
            for piece in pieces:
                self._write(memoryview(piece).cast("B"))
            return
        whole, filled = np.frombuffer(self._buffer, np.uint8), 0
        for piece in pieces:
            rest = np.frombuffer(piece, np.uint8)
            while rest.size:
                part = rest[: _WRITTEN_PIECE - filled]
                whole[filled : filled + part.size] = part  # other threads run meanwhile
                rest, filled = rest[part.size :], filled + part.size
                if filled == _WRITTEN_PIECE:
                    self._write(memoryview(self._buffer))
                    filled = 0
        self._write(memoryview(self._buffer)[:filled])

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                written = os.pwrite(self._fd, data, self._at)
                data, self._at = data[written:], self._at + written
            except OSError as error:
                if error.errno != errno.EINVAL or not self._set_direct(on=False):
                    raise

    def _set_direct(self, *, on: bool) -> bool:
        """O_DIRECT. Return whether that changed anything. Raises OSError."""
        before = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        after = before | os.O_DIRECT if on else before & ~os.O_DIRECT
        fcntl.fcntl(self._fd, fcntl.F_SETFL, after)
        return before != after


_READ_PIECE = 2**20


class Journal:
    """Appends to the journal. In a recovery it starts at byte `begin`, and writes the same lines
    again."""

    def __init__(self, path: Path, begin: int | None = None) -> None:
        path.touch()
        if begin is None:
            _cut_torn_line(path)
        self._path, self._file = path, path.open("r+b")
        self._sum = Checksum()
        left = path.stat().st_size if begin is None else begin
        while left and (piece := self._file.read(min(left, _READ_PIECE))):
            self._sum.update(piece)
            left -= len(piece)
        self._lines: list[str] = []
        """Not written yet, because the log of inputs has to be written first."""

    def write(self, *records: events.Record) -> None:
        self._lines.extend(map(events.to_line, records))

    @property
    def lines(self) -> int:
        """Lines that are not written yet."""
        return len(self._lines)

    def flush(self, lines: int | None = None) -> None:
        """Flush the next `lines` records, or all, to the operating system. Readers then see them, but
        they may not be on the disk yet."""
        written = "".join(self._lines[:lines]).encode()
        self._sum.update(written)
        with files.errors_name(self._path):
            self._file.write(written)
            self._file.flush()
        del self._lines[:lines]

    def sync(self) -> None:
        self.flush()
        os.fdatasync(self._file.fileno())

    def size(self) -> int:
        """Bytes up to the last flush."""
        return self._file.tell()

    def sum(self) -> int:
        """Checksum up to the last flush."""
        return self._sum.intdigest()

    def compare(self) -> tuple[bool, list[str]]:
        """Compare the complete lines after the present position with those that are not flushed. Return
        whether any differs, and the additional lines of the file, which is not changed."""
        end = self._file.tell()
        *lines, _torn = self._file.read().split(b"\n")
        self._file.seek(end)
        made = "".join(self._lines).encode().split(b"\n")[:-1]
        differs = any(ours != theirs for ours, theirs in zip(made, lines, strict=False))
        return differs, [line.decode(errors="replace") for line in lines[len(made) :]]

    def cut(self) -> None:
        """Flush, and remove the rest of the file."""
        self.flush()
        self._file.truncate()

    def close(self) -> None:
        self.sync()
        self._file.close()

    def abandon(self) -> None:
        """Close the file without writing the buffered records."""
        self._file.close()


def _cut_torn_line(path: Path) -> None:
    """A crash may have left it. The next record gets a line of its own."""
    whole = path.read_bytes().rpartition(b"\n")
    os.truncate(path, len(whole[0]) + len(whole[1]))


def save_model(folder: Path, name: str, w: Vector, buffers: Buffers, version: int, schema: str) -> None:
    """Atomically. `w`: shape (d,)."""
    metadata = {"version": str(version), "schema": schema}
    files.save(folder / f"{name}.safetensors", payloads.pack(w, metadata, buffers))


# File of a checkpoint: the aggregator's state as a pickle, with vectors as raw bytes.
#
# The state is a graph of objects that refer to each other (the core, its rule, and the server that both
# use), which pickle preserves. When a file is read, `_Reader` allows only classes of the modules in
# `_MODULES`, of the run's user code, and NumPy's arrays and generators. So a forged file cannot run code
# from elsewhere.
#
# Layout: `_HEAD` (magic number, length of the pickle, number of buffers, checksum of the rest), the
# lengths of the buffers, the pickle, the buffers. Integers are little endian.

_HEAD = struct.Struct("<8sQQQ")
_MAGIC = b"testbedC"
"""Version of the state's classes. Change it whenever one of them changes."""
_MODULES = {
    "agents.aggregator.dispatches",
    "agents.aggregator.core",
    "agents.aggregator.progress",
    "agents.aggregator.intake",
    "agents.aggregator.clients",
    "agents.aggregator.inputs",
    "agents.models.vectors",
    "agents.config",
    "agents.device_actions",
    "agents.events",
    "agents.mqtt.rate_limit",
    "agents.rules.client_half",
    "agents.rules.interface",
    "agents.rules.parts",
    *features.MODULES,
    *(rule.__module__ for rule in RULES.values()),
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


def save_snapshot(state: object, path: Path) -> int:
    """Write atomically, and flush to the disk; return the size in bytes."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(state, protocol=5, buffer_callback=buffers.append)
    raw = [one.raw() for one in buffers]
    lengths = struct.pack(f"<{len(raw)}Q", *map(len, raw))
    head = _HEAD.pack(_MAGIC, len(pickled), len(raw), files.checksum_of(lengths, pickled, *raw))
    with files.atomic_write(path) as partial, files.open_private(partial, "wb") as file:
        file.write(head + lengths + pickled)
        for buffer in raw:
            file.write(buffer)
        file.flush()
        os.fdatasync(file.fileno())
        size = file.tell()
    files.sync_folder(path.parent)  # the file's name must be on the disk, too
    return size


def check_snapshot(path: Path) -> None:
    """Raise SnapshotError if the file was not written by this version of the testbed, by its magic
    number. Raises OSError."""
    with files.open_regular(path) as file:
        _check_magic(path, file.read(len(_MAGIC)))


def _check_magic(path: Path, magic: bytes) -> None:
    if magic != _MAGIC:
        ours = magic.startswith(_MAGIC[:-1])
        other = "was written by another version of the testbed: resume the run with that one"
        raise SnapshotError(f"{path} {other if ours else 'is not a checkpoint'}")


def load_snapshot(path: Path) -> Any:
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
            if files.checksum_of(head, pickled, *buffers) != summed:
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
        ours = module in _MODULES or module.startswith(features.PACKAGES)
        if ours or (module, name) in _OTHERS or user_code.has_module(module):
            found = super().find_class(module, name)
            if (module, name) in _OTHERS or (isinstance(found, type) and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no state contains")
