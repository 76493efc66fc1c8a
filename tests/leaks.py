"""Files and sockets that a test has left open, found at its own end.

An object that nobody refers to any more, but is part of a cycle, is closed with a ResourceWarning when
the garbage collector comes by, which may be in any later test. So where a test ends with other open files
than it began with, the collector is run at once: what it warns of was left by that test, which fails.
What stays open is in use, as by a fixture of the module.
"""

from __future__ import annotations

import gc
import os
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
    if open_files().items() <= before.items():
        return []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    return [str(warning.message) for warning in told]
