"""Turns in which the clients of a host start.

If all clients import PyTorch at the same time, each import takes more CPU time, because they displace
each other from the caches of the cores. So a client starts when one of a few files is locked for it, and
unlocks it when it is ready. The kernel unlocks the files of a process that ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

_PER_CORE = 2
"""Clients per core that start at the same time: while one waits for the disk or the broker, another has
the core."""
_POLL_SECONDS = 0.1


def names(cores: int) -> list[str]:
    return [f"turn-{number}" for number in range(_PER_CORE * cores)]


def make(folder: Path, cores: int) -> None:
    """Files readable for the inits of all devices, whatever the umask is."""
    for name in names(cores):
        (folder / name).touch()
        (folder / name).chmod(0o644)


def take(folder: Path, seconds: float, is_over: Callable[[], bool]) -> int | None:
    """Lock one of the files in `folder`, and return its descriptor; wait while all are locked. The turn
    ends when each process that has the descriptor has closed it or ended.

    None without a turn after `seconds`, because a client that hangs, or means harm, keeps its turn; also
    if there are no files, if the file system does not lock them, or if `is_over`.
    """
    deadline = time.monotonic() + seconds
    while (files := sorted(folder.glob("turn-*"))) and not is_over():
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            except OSError:  # NFS locks only what may be written
                os.close(descriptor)
                return None
            else:
                return descriptor
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_SECONDS)
    return None
