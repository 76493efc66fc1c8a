"""Plain values to typed ones with msgspec, also by several threads at once."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_preparing = threading.Lock()
_prepared: set[type] = set()


def convert(values: Any, cls: type[T]) -> T:
    """Raises msgspec.ValidationError with the path of the wrong value."""
    if cls not in _prepared:
        with _preparing:
            # msgspec 0.22 prepares a class at its first use. Another thread that uses the class
            # meanwhile ends the process with SIGSEGV.
            msgspec.json.Decoder(cls)
            _prepared.add(cls)
    return msgspec.convert(values, cls)
