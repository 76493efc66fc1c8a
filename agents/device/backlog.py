"""Measure a shaped link in the run: bytes that left its queue while packets waited, against the bytes
that its rate allows in that time. Pure: time is an argument.

A transfer of the run also waits for the client and the aggregator, so its rate says little about the
link. While packets wait in the link's own queue, nothing but the link holds them back.
"""

from __future__ import annotations

from typing import NamedTuple

from agents.wire.messages import QueueUse

PACKET = 1514
"""Bytes of a full packet, Ethernet header included."""
_STUCK_SECONDS, _STUCK_PACKETS = 1.0, 3
"""A queue is stuck if nothing has left it for so long, and its rate allows so many packets then."""


class _Look(NamedTuple):
    at: float
    left: int
    waiting: float
    rate: int | None
    behind: int


class Backlog:
    """One direction of one link."""

    def __init__(self) -> None:
        self._last: _Look | None = None
        self._busy, self._left, self._allowed = 0.0, 0, 0.0
        self._still_since = 0.0
        """When something left the queue last, or it was empty, or its rate changed."""

    def look(self, at: float, left: int, waiting: float, rate: int | None, behind: int = 0) -> None:
        """Count the time since the last look if packets waited throughout.

        That is certain if less has left meanwhile than waited then. TCP keeps the queue short at its own
        host, and fills it up from its sockets: there, packets waited if some do now and then, and less
        has left than waited in both. `left`: bytes that have left the queue so far; `waiting`: bytes in
        it; `behind`: bytes in sockets; `rate`: of the link from now on, in bit/s; None: unlimited. `at`:
        seconds of a clock that never goes back.
        """
        last, self._last = self._last, _Look(at, left, waiting, rate, behind)
        if last is None or rate != last.rate or left != last.left or not last.waiting:
            self._still_since = at
        if last is None or last.rate is None:
            return
        passed = left - last.left
        certain = last.waiting + (last.behind if last.waiting and waiting else 0)
        if 0 <= passed < certain:
            self._busy += at - last.at
            self._left += passed
            self._allowed += last.rate / 8 * (at - last.at)

    def pause(self) -> None:
        """Count nothing until the next look, such as during an outage that was ordered."""
        self._last = None

    @property
    def stuck_since(self) -> float | None:
        """When something left the queue last, if nothing leaves it though its rate allows that."""
        if self._last is None or not self._last.waiting or self._last.rate is None:
            return None
        still = self._last.at - self._still_since
        packets = self._last.rate / 8 * still / PACKET
        return self._still_since if still >= _STUCK_SECONDS and packets >= _STUCK_PACKETS else None

    @property
    def use(self) -> QueueUse:
        return QueueUse(self._busy, self._left, round(self._allowed))
