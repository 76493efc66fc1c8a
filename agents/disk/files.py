"""Files that a reader sees whole or not at all, whenever the writer dies; and reading files that anybody
may have written or damaged."""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from agents.disk import checksum
from agents.disk.checksum import PACKED, Checksum


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, which becomes `path` in one step where nothing is raised. Also
    when two do this at once."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def save(path: Path, pieces: Iterable[bytes | memoryview], *, secret: bool = False) -> None:
    """Write `pieces`, one after the other; all of them are on the disk as `path` when this returns.
    `secret`: for this user alone."""
    with (
        atomic_write(path) as partial,
        open_private(partial, "wb") if secret else partial.open("wb") as file,
    ):
        file.writelines(pieces)
        file.flush()
        os.fdatasync(file.fileno())


def with_checksum(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """`pieces` and, behind them, their checksum: what `unsealed` reads."""
    found = Checksum()
    for piece in pieces:
        found.update(piece)
        yield piece
    yield PACKED.pack(found.intdigest())


def without_checksum(data: bytes | mmap.mmap) -> memoryview:
    """Return the bytes that `sealed` was given, joined. Raises ValueError if they were changed."""
    view = memoryview(data)
    content, found = view[: -PACKED.size], view[-PACKED.size :]
    if len(view) < PACKED.size or checksum.checksum_of(content) != PACKED.unpack(found)[0]:
        raise ValueError("its checksum is wrong: it is damaged, or not whole")
    return content


def open_private(path: Path, mode: Literal["wb", "ab"]) -> BinaryIO:
    """Open a file to write it, which other users may neither read nor write; nor one that is there
    already from now on."""
    return open(path, mode, opener=_private)


def _private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it. Raises OSError, also for what is no regular file: one would wait for ever
    for the other end of a pipe, and a device such as /dev/zero has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "this is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read(path: Path, most: int) -> bytes:
    """What is in a regular file. Raises OSError, also where that is more than `most` bytes."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"this is larger than {most / 2**20:g} MiB", str(path))
    return data


def from_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for any other text, and for one with half of a
    surrogate pair, which no file can hold and nobody can print."""
    try:
        value = json.loads(text)
        if (r"\u" in text) if isinstance(text, str) else (rb"\u" in text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(f"values are nested too deeply: {error}") from None
    return value
