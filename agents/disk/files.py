"""Files: atomic writing, so that a crash never leaves a partial file, safe reading, and checksums."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import secrets
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from xxhash import xxh3_64

PACKED = struct.Struct("<Q")
"""Format of a checksum in a file: 8 bytes, little-endian."""
Checksum = xxh3_64
"""`update` adds bytes, `intdigest` returns the checksum of all."""


def checksum_of(*pieces: bytes | bytearray | memoryview) -> int:
    found = Checksum()
    for piece in pieces:
        found.update(piece)
    return found.intdigest()


FULL_DISK = 4
"""Exit code of a process that could not write its files because of `NO_SPACE`."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, of a used up quota, and of a file that may not grow (`ulimit -f`)."""


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Add `path` to an OSError without a file name, as calls on open files raise them."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to `path` in one step, or removed after an exception.
    Several processes may write to `path` at the same time."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with errors_name(path):
            yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def save(path: Path, pieces: Iterable[bytes | bytearray | memoryview], *, secret: bool = False) -> None:
    """Write atomically, and flush to the disk. `secret`: only this user may read the file."""
    with (
        atomic_write(path) as partial,
        open_private(partial, "wb") if secret else partial.open("wb") as file,
    ):
        file.writelines(pieces)
        file.flush()
        os.fdatasync(file.fileno())


def with_checksum(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The checksum comes last, as `without_checksum` reads it."""
    found = Checksum()
    for piece in pieces:
        found.update(piece)
        yield piece
    yield PACKED.pack(found.intdigest())


def without_checksum(data: bytes | mmap.mmap) -> memoryview:
    """Raises ValueError if the checksum is wrong."""
    view = memoryview(data)
    content, found = view[: -PACKED.size], view[-PACKED.size :]
    if len(view) < PACKED.size or checksum_of(content) != PACKED.unpack(found)[0]:
        raise ValueError("its checksum is wrong: it is damaged or incomplete")
    return content


def sync_folder(folder: Path) -> None:
    """Flush the names of files in `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_private(path: Path, mode: Literal["wb"]) -> BinaryIO:
    """Only this user may read or write the file, even an existing one."""
    return open(path, mode, opener=_private)


def create_private(path: Path) -> int:
    """Descriptor for writing to such a file. An existing one keeps its content."""
    return _private(path, os.O_WRONLY | os.O_CREAT)


def _private(path: str | Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def open_regular(path: Path) -> BinaryIO:
    """Raises OSError for any other kind of file: opening a pipe might wait for ever, and a device such
    as /dev/zero has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "this is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read(path: Path, most: int) -> bytes:
    """Raises OSError if the file cannot be read, is not a regular one, or has more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read() if size <= most else b""  # read(most + 1) would first allocate `most` bytes
    if max(size, len(data)) > most:
        raise OSError(errno.EFBIG, f"this is larger than {most / 2**20:g} MiB", str(path))
    return data


def sha256(path: Path) -> str:
    """Hexadecimal digits, of a regular file. Raises OSError."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def from_json(text: str | bytes) -> Any:
    """Raises ValueError if the text is invalid, nested too deeply, or has half of a surrogate pair,
    which cannot be written or printed."""
    try:
        value = json.loads(text)
        if (r"\u" in text) if isinstance(text, str) else (rb"\u" in text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(f"values are nested too deeply: {error}") from None
    return value
