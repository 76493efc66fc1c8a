"""Files that a client keeps when its process is restarted: its memory, and updates that are not
acknowledged."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from agents.disk import files
from agents.rules.client_half import SavedVectors
from agents.wire import payloads


def save_memory(memory: SavedVectors, path: Path) -> None:
    """`memory` must not be empty. A crash leaves the old file or the new one, whole."""
    sizes = [vector.size for _, vector in memory.values()]
    metadata = {name: str(number) for name, (number, _) in memory.items()}
    if len(set(sizes)) > 1:  # vectors of equal length are saved without their size
        metadata = {
            name: f"{number} {size}"
            for (name, number), size in zip(metadata.items(), sizes, strict=True)
        }
    vectors = np.concatenate([vector for _, vector in memory.values()], dtype="<f4")
    files.save(path, files.with_checksum(payloads.pack(vectors, metadata)), secret=True)


def load_memory(path: Path) -> SavedVectors:
    """Empty if there is no file. Raises OSError, and ValueError if the file is damaged."""
    if not path.exists():
        return {}
    with files.open_regular(path) as file:
        vectors, metadata, _ = payloads.unpack(bytes(files.without_checksum(file.read())))
    texts = [text.split() for text in metadata.values()]
    lengths = [int(size) for _, *sizes in texts for size in sizes]
    parts = np.split(vectors, np.cumsum(lengths)[:-1] if lengths else len(metadata))
    return {name: (int(text[0]), part) for name, text, part in zip(metadata, texts, parts, strict=True)}


def read_count(path: Path) -> int:
    """Calls of `count_one_more`."""
    return path.stat().st_size if path.is_file() else 0


def count_one_more(path: Path) -> None:
    """One byte is appended, so the count is correct even if the process is killed at any moment."""
    with path.open("ab") as file:
        file.write(b"\n")


# One file for each update that a client has finished and the aggregator has not acknowledged.
#
# The files survive a crash of the process. They are not fsynced, because a power loss of a device is not
# emulated. Each has an update, as it is sent, and a checksum. A file that is damaged, or is no update,
# is renamed and reported, so that it does not block others.

_SUFFIX = ".update"
_ASIDE = ".aside"
_SPARE = "spare"
_MAX_BYTES = 2**33


class Outbox:
    """`report`: called with a sentence for each file that is set aside."""

    def __init__(self, folder: Path, report: Callable[[str], object]) -> None:
        self._folder, self._report = folder, report
        self._open: list[int] = []
        """Dispatches that the updates in the folder answer, oldest first."""
        self._spare = folder / _SPARE
        """Reused for the next update: writing to existing pages takes less than half the time."""
        for path in sorted(folder.iterdir()):
            if path.name != _SPARE and (path.suffix != _SUFFIX or path.name.startswith(".")):
                continue
            if path.is_symlink() or not path.is_file():
                self._set_aside(path, "it is not a regular file")
            elif path.name != _SPARE and not _is_number(path.stem):
                self._set_aside(path, "its name is not the number of a dispatch")
            elif path.name != _SPARE:
                self._open.append(int(path.stem))
        self._open.sort()

    def put(self, dispatch: int, pieces: Iterable[bytes | memoryview]) -> None:
        """The payload is the concatenation of `pieces`."""
        with files.atomic_write(self._file(dispatch)) as partial:
            try:
                self._spare.rename(partial)
            except FileNotFoundError:
                partial.touch(0o600)
            with partial.open("r+b") as file:
                file.writelines(files.with_checksum(pieces))
                file.truncate()
        if dispatch in self._open:  # a restarted aggregator may use numbers again
            self._open.remove(dispatch)
        self._open.append(dispatch)

    def discard(self, dispatch: int) -> None:
        """Remove the update that answers `dispatch`, because the aggregator has it."""
        if dispatch in self._open:
            self._open.remove(dispatch)
            self._file(dispatch).replace(self._spare)

    def close(self) -> None:
        """Unacknowledged updates stay."""
        self._spare.unlink(missing_ok=True)

    def payloads(self) -> Iterator[memoryview]:
        """Unacknowledged updates, oldest first, as views of their files, valid until the next `put`.
        Files that cannot be read are set aside."""
        for dispatch in [*self._open]:
            try:
                payload = _payload(self._file(dispatch))
            except (OSError, ValueError) as error:
                self._open.remove(dispatch)
                reason = error.strerror if isinstance(error, OSError) else error
                self._set_aside(self._file(dispatch), f"it cannot be read: {reason}")
            else:
                yield payload

    def _file(self, dispatch: int) -> Path:
        return self._folder / f"{dispatch}{_SUFFIX}"

    def _set_aside(self, path: Path, why: str) -> None:
        aside = path.with_name(f"{path.name}{_ASIDE}")
        if os.path.lexists(aside):
            aside = aside.with_name(f"{aside.name}-{secrets.token_hex(4)}")
        try:
            path.rename(aside)
        except OSError as error:
            self._report(f"{path} is ignored, and cannot be renamed ({error.strerror}): {why}")
        else:
            self._report(f"{path} is set aside as {aside.name}: {why}")


def set_aside(folder: Path) -> list[str]:
    """Files that are no valid updates, with a sentence for each. The outbox's client must not be
    running."""
    reports: list[str] = []
    if folder.is_dir():
        for _ in Outbox(folder, reports.append).payloads():
            pass
    return reports


def _is_number(text: str) -> bool:
    return len(text) < 20 and text.isascii() and text.isdecimal() and str(int(text)) == text


def _payload(path: Path) -> memoryview:
    """Raises OSError, and ValueError if the file is damaged."""
    with files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_BYTES:
            raise ValueError(f"it has {size:,} bytes, expected at most {_MAX_BYTES:,}")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        return files.without_checksum(data)


def retry_while_disk_full(write: Callable[[], object], wait: Callable[[float], bool]) -> bool:
    """Repeat `write` each second while the disk is full. Return whether it succeeded.

    `wait` waits for a number of seconds, and returns True to give up. Raises any other OSError.
    """
    while True:
        try:
            write()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if wait(1.0):
                return False
        else:
            return True
