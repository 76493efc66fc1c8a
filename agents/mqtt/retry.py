"""Repeated attempts at an operation that fails while a peer is still starting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_LATE_SECONDS = 5.0
"""Seconds after which the attempts take unusually long."""


def retry(
    attempt: Callable[[], T], timeout_s: float, late: Callable[[OSError], object] = lambda _: None
) -> T:
    """Call `attempt` until it raises no OSError, and return its result. After `timeout_s` seconds, raise
    the OSError of the last attempt. If the attempts take unusually long, call `late` once, with the last
    OSError."""
    begin, is_late = time.monotonic(), False
    while True:
        try:
            return attempt()
        except OSError as error:
            waited = time.monotonic() - begin
            if waited > timeout_s:
                raise
            if waited > _LATE_SECONDS and not is_late:
                is_late = True
                late(error)
            time.sleep(0.1)
