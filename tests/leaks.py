"""Files and sockets that a test has left open, found at its own end.

An object that nobody refers to any more, but is part of a cycle, is closed when the garbage collector
comes by, which may be in any later test. So where a test ends with more open files than it began with,
the collector is run at once: what it closes was left by that test, which fails. What stays open is in
use, as by a fixture of the module.
"""

from __future__ import annotations

import gc
import os
import socket
import warnings
from collections.abc import Mapping
from contextlib import suppress


def open_files() -> dict[int, str]:
    """What each file descriptor of this process is of, as the kernel says."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (faster)
        with suppress(OSError):  # that of the listing
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found


def left_since(before: Mapping[int, str]) -> list[str]:
    """Close what has been opened since `before` and was left to the garbage collector; in words."""
    new = {(number, what) for number, what in open_files().items() if before.get(number) != what}
    if not new:
        return []
    words = {number: _in_words(number, what) for number, what in new}
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # it is told here
        gc.collect()
    return [words[number] for number, _ in sorted(new - set(open_files().items()))]


def _in_words(number: int, what: str) -> str:
    if what.startswith("socket:"):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as same:
            return f"{what} ({same.family.name}, at {same.getsockname()})"
    return what
