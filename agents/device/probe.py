"""What a device's link gives, measured through it before the run clock starts."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable

from agents import packettrain, speedtest
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
_TRAINS, _GOOD = 4, 0.98
"""Trains at most, until one is as good: a busy host makes them slower, and nothing makes them faster."""
_PATIENCE = 30.0
"""Seconds until the router must answer."""


def measure(asked: Link, host: str, shared: str) -> dict[str, float]:
    """Through `asked`, to the router `host`: `rtt` in seconds, `jitter` (their standard deviation) and
    `loss` (share), all of round trips; `up` and `down` in bit/s on the wire where rates are asked.
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
        late = _LATE + asked.rtt + 2 * asked.jitter
        if asked.up is not None:
            found["up"] = _fastest(packettrain.upload, host, asked.up, late)
        if asked.down is not None:
            found["down"] = _fastest(packettrain.download, host, asked.down, late)
    return found


def _fastest(
    measured: Callable[[str, int, float], float], host: str, rate: int, patience: float
) -> float:
    best = 0.0
    for _ in range(_TRAINS):
        best = max(best, measured(host, rate, patience))
        if best > _GOOD * rate:
            break
    return best


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
