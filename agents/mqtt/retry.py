"""Trying again what a peer that is still starting refuses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def retry(attempt: Callable[[], T], timeout_s: float) -> T:
    """The result of `attempt`, which is called until it raises no OSError, or for `timeout_s`. Raises
    the OSError of the last attempt."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
