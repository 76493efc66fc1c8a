"""Unplanned disturbances of a run, such as a process that stands still or a link that carries nothing,
reported when noticed, and again when over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

STANDSTILL_SECONDS = 3.0
"""A process must stand still, or a cause such as a cut interface last, for this long to be reported.
Standstills by an action are not reported."""
UNANSWERED_SECONDS = 8.0
"""Seconds without an acknowledgement after which a connection counts as cut."""
_BEAT_SECONDS = 0.5


def cut(device: str) -> str:
    """The device itself cannot distinguish this from an outage in the scenario."""
    return f"nothing came back to {device} over its network"


class Ongoing:
    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def update(self, found: Mapping[str, float]) -> Iterator[tuple[str, float, bool]]:
        """Reason, start and whether it is over, of each disturbance that is new or over. `found`: start
        times of the present ones, by reason."""
        for reason, since in found.items():
            if reason not in self._since:
                self._since[reason] = since
                yield reason, since, False
        for reason in self._since.keys() - found.keys():
            yield reason, self._since.pop(reason), True


class Standstills:
    """Standstills of this process of at least 3 s: the times between two calls, of which a thread makes
    at least two per second. They are in seconds on the monotonic clock."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._found: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def watch(self, report: Callable[[float, float], object] | None = None) -> None:
        """Start a daemon thread that calls `report` with start and end of each standstill. Without
        `report`, the standstills are kept for `pop`."""
        threading.Thread(target=self._beat, args=(report,), name="standstill", daemon=True).start()

    def pop(self) -> list[tuple[float, float]]:
        """Return start and end of each standstill until now that was not returned before."""
        with self._lock:
            self._look()
            found, self._found = self._found, []
            return found

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._last >= STANDSTILL_SECONDS + _BEAT_SECONDS:
            self._found.append((self._last, now))
        self._last = now

    def _beat(self, report: Callable[[float, float], object] | None) -> None:
        while True:
            time.sleep(_BEAT_SECONDS)
            if report is None:
                with self._lock:
                    self._look()
                continue
            for since, at in self.pop():
                report(since, at)
