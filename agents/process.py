"""Imports, memory and exit of the testbed's processes."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, NoReturn


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


_META_KERNELS = "torch._meta_registrations"


class _Postponed(ModuleType):
    """Stands for the module `_META_KERNELS` while PyTorch is imported. It is imported when a name is
    read from it, except for dunder names, which `inspect` reads from all modules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        sys.modules.pop(_META_KERNELS, None)
        return getattr(importlib.import_module(_META_KERNELS), name)


class _Completion(MetaPathFinder):
    """Imports the module `_META_KERNELS` before any other module of PyTorch, because the others expect
    it."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname.startswith("torch."):
            sys.meta_path.remove(self)
            if fullname != _META_KERNELS:
                importlib.import_module(_META_KERNELS)


@contextmanager
def without_meta_kernels() -> Iterator[None]:
    """`import torch` leaves out the kernels for PyTorch's meta device (tensors without data): a quarter
    of the CPU time of the import, and 18 of its 145 MB.

    What needs these kernels, such as torch.compile, imports more modules of PyTorch, and then them as
    well. Only meta tensors that are made directly lack them: user code may make some, so it needs the
    whole import. No effect if torch is imported already.
    """
    if "torch" in sys.modules:
        yield
        return
    postponed = sys.modules[_META_KERNELS] = _Postponed(_META_KERNELS)
    try:
        yield
    finally:
        if sys.modules.get(_META_KERNELS) is postponed:
            del sys.modules[_META_KERNELS]
            vars(sys.modules.get("torch", postponed)).pop("_meta_registrations", None)
            sys.meta_path.insert(0, _Completion())


_frozen = False
"""Objects that existed at some time are frozen. gc.get_freeze_count would count them all."""


def freeze() -> None:
    """The garbage collector passes over all present objects until the process ends."""
    global _frozen
    gc.freeze()
    _frozen = True


@contextmanager
def frozen() -> Iterator[None]:
    """The garbage collector passes over the objects that exist at the begin, and at the end collects the
    others: a virtual run leaves cycles that hold its data. No effect if objects are frozen already, for
    longer."""
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
