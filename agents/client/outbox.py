"""Updates that a client has finished and the aggregator has not acknowledged, as files in one folder.

They outlive the process, but are not synced: the disk of a device that loses its power is not emulated.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from agents import files

_SUFFIX = ".update"
_SPARE = "spare"


class Outbox:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = sorted(int(path.stem) for path in folder.glob(f"*{_SUFFIX}"))
        """Dispatches that the updates in the folder answer, which are in the order of time."""
        self._spare = folder / _SPARE
        """The file of an update that was acknowledged, for the next one: to write where pages are there
        already takes less than half of the time."""

    def put(self, dispatch: int, pieces: Iterable[bytes | memoryview]) -> None:
        """Keep the update that answers `dispatch`, whose payload is `pieces`, one after the other."""
        with files.whole(self._file(dispatch)) as partial:
            try:
                self._spare.rename(partial)
            except FileNotFoundError:
                partial.touch()
            with partial.open("r+b") as file:
                file.writelines(pieces)
                file.truncate()
        if dispatch in self._open:  # by an aggregator that has lost its last dispatches (durability)
            self._open.remove(dispatch)
        self._open.append(dispatch)

    def acknowledged(self, dispatch: int) -> None:
        """The aggregator has the update that answers `dispatch`."""
        if dispatch in self._open:
            self._open.remove(dispatch)
            self._file(dispatch).replace(self._spare)

    def close(self) -> None:
        """Leave nothing but what is not acknowledged."""
        self._spare.unlink(missing_ok=True)

    def payloads(self) -> Iterator[memoryview]:
        """All that is not acknowledged, in the order in which it was put; views of the files, to be read
        before the next is put."""
        for dispatch in self._open:
            with self._file(dispatch).open("rb") as file:
                yield memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def _file(self, dispatch: int) -> Path:
        return self._folder / f"{dispatch}{_SUFFIX}"


def written(write: Callable[[], object], wait: Callable[[float], bool]) -> bool:
    """Whether `write` was done: while the disk is full, it is tried again every second. `wait` waits for
    so many seconds and says whether to give up. Raises OSError for what is no full disk."""
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
