"""What a device's link gives, measured through it before the run clock starts."""

from __future__ import annotations

import socket
import statistics
import time

from agents import speedtest
from agents.config import Link
from agents.device import echo

_MOST = 500
"""Round trips."""
_SECONDS = 2.0
"""For them."""
_CLOSEST = 0.002
"""Seconds between them, at least."""
_SHARE = 0.25
"""Of the link that they may take, so that none waits for another."""
_LATE = 1.0
"""Seconds after which an answer is lost, beside what the link delays it."""
_TRANSFERS = 2
"""Of which the faster one counts: a busy host makes them slower, and nothing makes them faster."""
_PATIENCE = 30.0
"""Seconds until the router must answer."""


def measure(asked: Link, host: str, shared: str) -> dict[str, float]:
    """Through `asked`, to the router `host`: `rtt` in seconds, `jitter` (their standard deviation) and
    `loss` (share), all of round trips; `up` and `down` in bit/s of TCP payload where rates are asked.
    `shared` names the link, for all that measure it in turn. Raises OSError.

    The round trip is the typical one under jitter, else the shortest: what is above that is the wait of
    a busy host, not the link's.
    """
    _await(host)
    with speedtest.turn(host, shared):
        trips = _round_trips(asked, host)
        answered = [trip for trip in trips if trip is not None]
        found = {"loss": 1 - len(answered) / len(trips)}
        if answered:
            found["rtt"] = statistics.median(answered) if asked.jitter else min(answered)
            found["jitter"] = statistics.pstdev(answered)
        if asked.up is not None:
            found["up"] = max(speedtest.upload(host, asked.up) for _ in range(_TRANSFERS))
        if asked.down is not None:
            found["down"] = max(speedtest.download(host, asked.down) for _ in range(_TRANSFERS))
    return found


def _round_trips(asked: Link, host: str) -> list[float | None]:
    """So far apart that none waits for another: for the link, or, as order is kept, for its jitter."""
    slowest = min(rate for rate in (asked.up, asked.down, 10**12) if rate is not None)
    own_time = 8 * (echo.SIZE + 14) / slowest
    every = max(_CLOSEST, own_time / _SHARE, 2 * asked.jitter)
    count = min(_MOST, max(5, int(_SECONDS / every)))
    address = socket.gethostbyname(host)
    return echo.round_trips(address, count, every, _LATE + asked.rtt + 2 * asked.jitter)


def _await(host: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            socket.create_connection((host, speedtest.PORT), 1.0).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return
