"""Imports without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Context manager that switches off garbage collection during imports. Imports make almost no
    garbage, but repeated collections would take a seventh of the time for importing PyTorch."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
