"""Measurement of a device's shaped link, before the run clock starts and during the run."""

from __future__ import annotations

import select
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

from agents.config import AccessLink
from agents.disturbances import retry
from agents.links import packets, probe_server
from agents.wire.messages import LinkFigures, QueueUse

# Measurement of a shaped link during the run: the bytes that left its queue while packets waited,
# against those that its rate allows in that time. No I/O and no clock.
#
# The rate of a transfer says little about the link, because transfers also wait for the client and the
# aggregator. But while packets wait in the link's own queue, only the link limits them.

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


# Measurement of a device's link before the run clock starts, with packets over the link.
#
# Rates are measured with `agents.links.packets`, and round trips with ICMP echoes. The other side's
# kernel answers these, so neither processes nor TCP's retransmissions affect the figures. Echoes go
# through a "ping socket" of the kernel, which needs no privilege if `net.ipv4.ping_group_range` includes
# the device's group.

_MAX_ROUND_TRIPS = 500
_ROUND_TRIPS_SECONDS = 2.0
"""Seconds for all round trips together."""
_MIN_INTERVAL_SECONDS = 0.002
_MAX_LINK_SHARE = 0.25
"""Share of the link's rate that round trips use, so small that no packet queues behind another."""
_LOST_AFTER_SECONDS = 1.0
"""Answers count as lost after this time plus the link's own delay."""
_SLOW_TRANSFERS, _MOST_TRANSFERS, _RETRY_SECONDS = 4, 40, 12.0
"""Maximum number of transfers: the first of these, or up to the second while they have taken less than
the seconds."""
_SUFFICIENT_RATE_SHARE = 0.98
"""Share of the rate above which no further transfer is made. A busy host can make one slower, but
nothing can make it faster than the link."""
_ECHO, _REPLY = 8, 0
_ECHO_HEADER = struct.Struct(">BBHHH")
"""ICMP echo: type, code, checksum, id, sequence number. The kernel fills in checksum and id."""
_ECHO_BYTES = 64
"""Length of each packet in bytes, including its IP header. Ethernet adds 14 bytes on the wire."""
_ECHO_BUFFER_BYTES = 1 << 20
"""Room for all answers, so that none is lost while a busy host lets the process wait."""
_ECHO_PAYLOAD = bytes(_ECHO_BYTES - 20 - _ECHO_HEADER.size)
_TRIES_AHEAD = 5
"""Maximum number of echoes before the measurement. None is sent after the first answer."""


def measure(requested: AccessLink, host: str, timeout: float) -> LinkFigures:
    """In the result, `rtt` and `jitter` (standard deviation of round trips) are in seconds, `loss` is
    the share of lost ones; `up` and `down`, if requested, are in bit/s on the wire. `timeout`: seconds
    until the router answers. Raises OSError."""
    server = host, probe_server.PORT
    retry(lambda: socket.create_connection(server, 1.0).close(), timeout)
    answer_timeout = _LOST_AFTER_SECONDS + requested.rtt + 2 * requested.jitter
    count, interval = pace(requested, _ECHO_BYTES + 14)
    trips = round_trips(socket.gethostbyname(host), count, interval, answer_timeout)
    answered = [trip for trip in trips if trip is not None]
    found: dict[str, Any] = round_trip_figures(requested, answered)
    found |= {"loss": 1 - len(answered) / len(trips), "round_trips": len(trips)}
    for name, rate, train in (
        ("up", requested.up, packets.upload_train),
        ("down", requested.down, packets.download_train),
    ):
        if rate is not None:
            reachable = rate * (1 - requested.loss)
            found[name] = fastest(partial(train, host, rate, answer_timeout), reachable)
    return LinkFigures(**found)


def pace(requested: AccessLink, size: int) -> tuple[int, float]:
    """Number of round trips of `size` bytes on the wire, and seconds from one to the next: so long that
    no packet queues behind another, and that the jitter of one does not delay the next (packets are not
    reordered)."""
    slowest = min(rate for rate in (requested.up, requested.down, 10**12) if rate is not None)
    interval = max(_MIN_INTERVAL_SECONDS, 8 * size / slowest / _MAX_LINK_SHARE, 2 * requested.jitter)
    return min(_MAX_ROUND_TRIPS, max(5, int(_ROUND_TRIPS_SECONDS / interval))), interval


def round_trip_figures(requested: AccessLink, trips: Sequence[float]) -> dict[str, float]:
    """`rtt` and `jitter` in seconds; empty without round trips.

    `rtt` is the median if the link has jitter, else the minimum, because longer round trips are delays
    of a busy host, not of the link.
    """
    if not trips:
        return {}
    rtt = statistics.median(trips) if requested.jitter else min(trips)
    return {"rtt": rtt, "jitter": statistics.pstdev(trips)}


def fastest(measured: Callable[[], float], rate: float) -> float:
    """Return the highest of several results of `measured`, which measures the rate of a link. No further
    call is made after a result close to `rate`, the rate that can be reached. A short measurement of a
    fast link is low if the sender has to wait for a core, for instance because other devices measure
    their links at the same time."""
    best, begin = 0.0, time.monotonic()
    for number in range(_MOST_TRANSFERS):
        if number >= _SLOW_TRANSFERS and time.monotonic() - begin >= _RETRY_SECONDS:
            break
        best = max(best, measured())
        if best > _SUFFICIENT_RATE_SHARE * rate:
            break
    return best


def round_trips(host: str, count: int, interval_s: float, timeout_s: float) -> list[float | None]:
    """Seconds of each of `count` round trips, one every `interval_s`; None if the packet was lost, or
    not answered within `timeout_s` after the last one. A process that gets too little CPU time sends
    fewer, in at most twice the time.

    A few echoes before that do not count: packets may be lost until a router knows their flow. Raises
    OSError.
    """
    sent: list[int] = []
    found: list[float | None] = []
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)) as sock:
        packets.enable_timestamps(sock)
        packets.enlarge_receive_buffer(sock, _ECHO_BUFFER_BYTES)
        sock.connect((host, 0))
        for _ in range(_TRIES_AHEAD):
            _send_echo(sock, count)
            if select.select([sock], [], [], timeout_s)[0]:
                break
        due = time.monotonic()
        last = due + 2 * count * interval_s
        while True:
            now = time.monotonic()
            if is_sending := len(sent) < count and (not sent or now < last):
                if now >= due:
                    sent.append(time.clock_gettime_ns(time.CLOCK_REALTIME))
                    found.append(None)
                    _send_echo(sock, len(sent) - 1)
                    due = now + interval_s
                end = due + timeout_s
            elif None not in found:
                break
            if not select.select([sock], [], [], max(0.0, (due if is_sending else end) - now))[0]:
                if not is_sending:
                    break
                continue
            data, ancillary, _, _ = sock.recvmsg(_ECHO_BYTES, packets.ANCILLARY_BYTES)
            kind, _, _, _, number = _ECHO_HEADER.unpack_from(data)
            if kind == _REPLY and number < len(sent):
                found[number] = (packets.timestamp_in(ancillary) - sent[number]) / 1e9
    return found


def _send_echo(sock: socket.socket, number: int) -> None:
    sock.send(_ECHO_HEADER.pack(_ECHO, 0, 0, 0, number) + _ECHO_PAYLOAD)
