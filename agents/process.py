"""Memory and exit of the agents' processes."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from typing import NoReturn

_MIB = 2**20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
_KEPT, _LARGEST = 64 * _MIB, 32 * _MIB
"""Freed memory that is kept in all, and in one block; glibc allows no larger block."""


def keep_freed_memory() -> None:
    """Keep up to 64 MiB of freed memory, in blocks of up to 32 MiB. This works only with glibc.

    Vectors of the model's size are allocated and freed with every update. The kernel would have to zero
    returned memory for each new vector, which takes longer than computing with it.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def exit_now(code: int) -> NoReturn:
    """Flush the output and end this process now, without cleaning up. Deleting PyTorch's objects would
    take 0.2 s on one core, or 2 s on a tenth of a core, and Python would wait for threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
