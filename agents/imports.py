"""Imports that take less time and memory, and objects that the garbage collector passes over."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


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
