"""Disturbances of a run that nobody ordered, such as a process that stands still or a link that carries
nothing. Each is reported when it is noticed, and again when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

STANDSTILL_SECONDS = 3.0
"""A process that did nothing for so long, though nobody ordered that, disturbs the run."""
UNANSWERED_SECONDS = 8.0
"""A connection on which nothing is acknowledged for so long is cut."""
_BEAT_SECONDS = 0.5


def cut(device: str) -> str:
    """Reason where nothing comes back to `device` over its network; an outage that was ordered looks the
    same to it."""
    return f"nothing came back to {device} over its network"


class Ongoing:
    """Disturbances that have been noticed and are not over."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def update(self, found: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        """Yield reason and begin of each disturbance that is new or over. `found` has the present ones:
        when each began, by its reason."""
        for reason, since in found.items():
            if reason not in self._since:
                self._since[reason] = since
                yield reason, since
        for reason in self._since.keys() - found.keys():
            yield reason, self._since.pop(reason)


def watch(report: Callable[[float, float], object]) -> None:
    """Have `report` called whenever this process has stood still: with the begin and the end, seconds of
    the monotonic clock. A daemon thread does it."""
    threading.Thread(target=_beat, args=(report,), name="standstill", daemon=True).start()


def _beat(report: Callable[[float, float], object]) -> None:
    last = time.monotonic()
    while True:
        time.sleep(_BEAT_SECONDS)
        now = time.monotonic()
        if now - last >= STANDSTILL_SECONDS + _BEAT_SECONDS:
            report(last, now)
        last = now
