"""Imports without the garbage collector, and objects that it passes over."""

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


_frozen = False
"""Whether the objects that existed at some time are frozen. gc.get_freeze_count would count them all."""


def freeze() -> None:
    """Have the garbage collector pass over all present objects until the process ends."""
    global _frozen
    gc.freeze()
    _frozen = True


@contextmanager
def frozen() -> Iterator[None]:
    """Context manager in which the garbage collector passes over the objects that exist at its begin.
    At its end it collects the other ones: a virtual run leaves cycles that hold its data. It changes
    nothing if objects are frozen already, for longer."""
    global _frozen
    if _frozen:
        yield
        return
    freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        _frozen = False
