"""Measurement of a shaped link during the run: the bytes that left its queue while packets waited,
against those that its rate allows in that time. No I/O and no clock.

The rate of a transfer says little about the link, because transfers also wait for the client and the
aggregator. But while packets wait in the link's own queue, only the link limits them.
"""

from __future__ import annotations

from typing import NamedTuple

from agents.wire.messages import QueueUse

PACKET = 1514
"""Bytes of a full packet, with the Ethernet header."""
_STUCK_SECONDS, _STUCK_PACKETS = 1.0, 3
"""A queue is stuck if nothing has left it for at least these seconds, in which the rate allows at least
these packets."""


class _QueueReading(NamedTuple):
    """Fields as `Backlog.read` describes them."""

    at: float
    left: int
    waiting: float
    rate: int | None
    behind: int


class Backlog:
    """One direction of a link."""

    def __init__(self) -> None:
        self._last: _QueueReading | None = None
        self._busy, self._left, self._allowed = 0.0, 0, 0.0
        self._since_departure: tuple[float, float] | None = None
        """Seconds, and bytes that the rate allows in them, since a packet left that had waited; None if
        the queue may have been empty since then."""
        self._still_since = 0.0
        """Last time at which a packet left the queue, the queue was empty, or the link's rate
        changed."""

    def read(self, at: float, left: int, waiting: float, rate: int | None, behind: int = 0) -> None:
        """Add a reading of the counters. Time counts only if packets waited during all of it, and only
        from one departure of packets that had waited to another. At such a departure the link's token
        bucket is empty, and the next packet's time begins. On a slow link, whose packets take longer
        than the time between readings, other times would be wrong by a packet.

        Packets certainly waited all the time if fewer bytes have left the queue than waited at the
        previous reading. On the sending host, TCP keeps the queue short and refills it from its sockets.
        So packets also waited all the time if packets waited at both readings, and if fewer bytes have
        left the queue than waited in the queue and the sockets at the previous reading.

        `at`: seconds of a clock that never goes back. `left`: bytes that have left the queue so far.
        `waiting`: bytes in the queue. `rate`: rate of the link from now on, in bit/s; None if the rate
        is not limited. `behind`: bytes that wait in sockets and have not entered the queue yet.
        """
        last, self._last = self._last, _QueueReading(at, left, waiting, rate, behind)
        if last is None or rate != last.rate or left != last.left or not last.waiting:
            self._still_since = at
        if last is None or last.rate is None:
            self._since_departure = None
            return
        passed = left - last.left
        certain = last.waiting + (last.behind if last.waiting and waiting else 0)
        if not 0 <= passed < certain:
            self._since_departure = None
            return
        since = self._since_departure
        if since is not None:
            elapsed = at - last.at
            since = since[0] + elapsed, since[1] + last.rate / 8 * elapsed
        if passed:
            if since is not None:
                self._busy += since[0]
                self._left += passed
                self._allowed += since[1]
            since = 0.0, 0.0
        self._since_departure = since

    def pause(self) -> None:
        """Do not count the time until the next reading, e.g. during an ordered outage."""
        self._last = self._since_departure = None

    @property
    def stuck_since(self) -> float | None:
        """Time since which nothing has left the queue; None if it is not stuck."""
        if self._last is None or not self._last.waiting or self._last.rate is None:
            return None
        still = self._last.at - self._still_since
        packets = self._last.rate / 8 * still / PACKET
        return self._still_since if still >= _STUCK_SECONDS and packets >= _STUCK_PACKETS else None

    @property
    def use(self) -> QueueUse:
        """Totals of the queue over the time that counts (`read`)."""
        return QueueUse(self._busy, self._left, round(self._allowed))
