"""Unplanned disturbances of a run, such as a process that stands still or a link that carries nothing.
Each disturbance is reported when it is noticed, and again when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

STANDSTILL_SECONDS = 3.0
"""Seconds that a process must stand still, or a cause such as a cut interface must last, before a
disturbance is reported. Standstills that an action caused are not reported."""
UNANSWERED_SECONDS = 8.0
"""Seconds without an acknowledgement after which a connection counts as cut."""
_BEAT_SECONDS = 0.5


def cut(device: str) -> str:
    """Return the text that reports a cut connection of `device`. The device itself cannot distinguish a
    cut connection from an outage in the scenario."""
    return f"nothing came back to {device} over its network"


class Ongoing:
    """Disturbances that have been noticed and are not over yet."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def update(self, found: Mapping[str, float]) -> Iterator[tuple[str, float, bool]]:
        """Yield reason and start time of each disturbance that is new or over, and whether it is over.
        `found`: start times of the present disturbances, by reason."""
        for reason, since in found.items():
            if reason not in self._since:
                self._since[reason] = since
                yield reason, since, False
        for reason in self._since.keys() - found.keys():
            yield reason, self._since.pop(reason), True


def watch(report: Callable[[float, float], object]) -> None:
    """Start a daemon thread that calls `report` after each standstill of this process of at least 3 s.
    `report` gets the start and the end of the standstill, in seconds on the monotonic clock."""
    threading.Thread(target=_beat, args=(report,), name="standstill", daemon=True).start()


def _beat(report: Callable[[float, float], object]) -> None:
    last = time.monotonic()
    while True:
        time.sleep(_BEAT_SECONDS)
        now = time.monotonic()
        if now - last >= STANDSTILL_SECONDS + _BEAT_SECONDS:
            report(last, now)
        last = now
