"""Files and sockets that a test has left open, found at its own end.

An object that nobody refers to any more, but is part of a cycle, is closed when the garbage collector
comes by, which may be in any later test, and then warns or not. So where a test ends with other open
files than it began with, the collector is run at once. If it closes any, that test fails. What is still
open then is in use, as by a fixture of the module.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress

_PASSED_OVER = ("pipe:", "anon_inode:")
"""Are closed without a warning, or by a thread that reads to the end."""


def open_files() -> dict[int, str]:
    """What each file descriptor of this process is of, as the kernel says."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (faster)
        with suppress(OSError):  # that of the listing
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found


def left_since(before: Mapping[int, str]) -> list[str]:
    """Close what has been opened since `before` and was left to the garbage collector; in words."""
    new = _looked_at(open_files().items() - before.items())
    if not new:
        return []
    words = {number: _in_words(number, what) for number, what in new}
    interval = sys.getswitchinterval()
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # it is told here
        sys.setswitchinterval(60)  # no other thread closes anything meanwhile
        try:
            there = new & open_files().items()
            gc.collect()
        finally:
            sys.setswitchinterval(interval)
    return [words[number] for number, _ in sorted(there - open_files().items())]


def _looked_at(found: set[tuple[int, str]]) -> set[tuple[int, str]]:
    return {(number, what) for number, what in found if not what.startswith(_PASSED_OVER)}


def _in_words(number: int, what: str) -> str:
    if what.startswith("socket:"):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as same:
            return f"{same.family.name} at {same.getsockname()}"
    return what
