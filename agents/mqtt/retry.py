"""Repeated attempts at an operation that fails while a peer is still starting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def retry(attempt: Callable[[], T], timeout_s: float) -> T:
    """Call `attempt` until it raises no OSError, and return its result. After `timeout_s` seconds, raise
    the OSError of the last attempt."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
