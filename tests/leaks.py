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
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from unittest import mock

_PASSED_OVER = ("pipe:", "anon_inode:")
"""Open files that are of no matter here: nothing warns of them."""


def open_files() -> dict[int, str]:
    """Return the target of each file descriptor of this process, as the kernel reports it."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (faster)
        with suppress(OSError):  # that of the listing
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found


def left_since(before: Mapping[int, str]) -> list[str]:
    """Where files or sockets were opened since `before`: run the garbage collector, and return what it
    closes, in words. It may do so itself, with a warning, or by their owner's `__del__`."""
    new = open_files().items() - before.items()
    if all(what.startswith(_PASSED_OVER) for _, what in new):
        return []
    closed: list[str] = []
    close, thread = socket.socket._real_close, threading.get_ident()  # type: ignore[attr-defined]

    def closing(sock: socket.socket, *arguments: Any) -> None:
        if threading.get_ident() == thread and sock.fileno() >= 0:
            closed.append(repr(sock))
        close(sock, *arguments)

    with (
        warnings.catch_warnings(record=True) as told,
        mock.patch.object(socket.socket, "_real_close", closing),
    ):
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    return [*closed, *(str(warning.message) for warning in told)]
