"""Waiting for what is to happen soon, on a busy host a little later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(happened: Callable[[], T | None], seconds: float = 120) -> T:
    """Return the value of `happened` once it is true. Raises AssertionError if it never is."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {found!r}"
        time.sleep(0.05)
    return found
