"""Checks and conversion of values that come from users and from other processes."""

from __future__ import annotations

import math
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


class DeclarationError(ValueError):
    """A rule violates what it has declared (`agents.rules.client_half.ClientSide`), or other
    user code returns what it must not. The message says how."""


def positive(name: str, value: float | None) -> None:
    """Raise ValueError unless `value` is above 0 and finite."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} is {value:g}, expected above 0")


def duration(name: str, seconds: float | None) -> None:
    """Raise ValueError unless `seconds` is finite and at least 1 ns."""
    positive(name, seconds)
    if seconds is not None and seconds < 1e-9:
        raise ValueError(f"{name} is {seconds:g} s, expected at least 1e-09 s")


def at_least(name: str, value: float | None, least: float) -> None:
    """Raise ValueError unless `value` is at least `least`."""
    if value is not None and not value >= least:
        raise ValueError(f"{name} is {value:g}, expected at least {least:g}")
