"""Repeated attempts at what fails while a peer is still starting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_LATE_SECONDS = 5.0


def retry(
    attempt: Callable[[], T], timeout_s: float, late: Callable[[OSError], object] = lambda _: None
) -> T:
    """Repeat until there is no OSError; raise the last one after `timeout_s` seconds. If the attempts
    take unusually long, call `late` once, with the last OSError."""
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
