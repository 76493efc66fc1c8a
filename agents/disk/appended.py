"""Files that are written from front to back and often flushed to the disk: `AppendedFile`."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from agents.disk import files

BLOCK = 4096
"""Each write to a direct file must end at a multiple of this number of bytes."""
_PIECE = 2**20
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
            self._buffer = mmap.mmap(-1, _PIECE)
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
                part = rest[: _PIECE - filled]
                whole[filled : filled + part.size] = part  # other threads run meanwhile
                rest, filled = rest[part.size :], filled + part.size
                if filled == _PIECE:
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
