"""How the agents' processes use the system: the memory that they free, and their end."""

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
"""Bytes; the latter is the most that glibc takes."""


def keep_freed_memory() -> None:
    """From now on this process keeps up to 64 MiB that it has freed, in blocks of up to 32 MiB: vectors
    as large as the model are made and freed with every update, and pages that went back are zeroed when
    they are needed again, which takes longer than what is done with them. Only with glibc."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def exit_now(code: int) -> NoReturn:
    """End this process now, all printed. To clear away what PyTorch has made takes 0.2 s of a core, 2 s
    at a tenth of one; and Python would wait for threads, such as one that evaluates."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
