"""Measurement of a device's link, through the link itself, before the run clock starts."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from agents import packettrain, probe_server
from agents.config import Link
from agents.device import echo
from agents.messages import LinkFigures

_MAX_ROUND_TRIPS = 500
_ROUND_TRIPS_SECONDS = 2.0
"""Time spent on all round trips."""
_MIN_INTERVAL_SECONDS = 0.002
"""Between two round trips."""
_MAX_LINK_SHARE = 0.25
"""Share of the link's rate that round trips use, so that none queues behind another."""
_LOST_AFTER_SECONDS = 1.0
"""Time after which an answer counts as lost, in addition to the link's own delay."""
_MAX_TRAINS, _SUFFICIENT_RATE_SHARE = 4, 0.98
"""Trains are repeated until one reaches this share of the rate: a busy host slows a train, and nothing
speeds it up."""


def measure(requested: Link, host: str, shared: str, timeout: float) -> LinkFigures:
    """Figures of the link `requested` to the router `host`: `rtt` and `jitter` (their standard
    deviation) in seconds and `loss` (share), all of round trips; `up` and `down` in bit/s on the wire
    where rates are requested. `shared` names the link, which only one device measures at a time;
    `timeout` is the number of seconds within which the router must answer. Raises OSError.
    """
    _await(host, timeout)
    answer_timeout = _LOST_AFTER_SECONDS + requested.rtt + 2 * requested.jitter
    with probe_server.reserved_link(host, shared):
        count, interval = pace(requested, echo.SIZE + 14)
        trips = echo.round_trips(socket.gethostbyname(host), count, interval, answer_timeout)
        answered = [trip for trip in trips if trip is not None]
        found: dict[str, Any] = round_trip_figures(requested, answered)
        found |= {"loss": 1 - len(answered) / len(trips), "round_trips": len(trips)}
        if requested.up is not None:
            found["up"] = _fastest(packettrain.upload, host, requested.up, answer_timeout)
        if requested.down is not None:
            found["down"] = _fastest(packettrain.download, host, requested.down, answer_timeout)
    return LinkFigures(**found)


def pace(requested: Link, size: int) -> tuple[int, float]:
    """Number of round trips of `size` bytes on the wire to make through `requested`, and seconds between
    them: far enough apart that none queues behind another or, as order is kept, is delayed by the jitter
    of the one before."""
    slowest = min(rate for rate in (requested.up, requested.down, 10**12) if rate is not None)
    interval = max(_MIN_INTERVAL_SECONDS, 8 * size / slowest / _MAX_LINK_SHARE, 2 * requested.jitter)
    return min(_MAX_ROUND_TRIPS, max(5, int(_ROUND_TRIPS_SECONDS / interval))), interval


def round_trip_figures(requested: Link, trips: Sequence[float]) -> dict[str, float]:
    """`rtt` and `jitter`, in seconds, of round trips through `requested`; empty without round trips.

    `rtt` is the median under jitter, else the minimum: anything above that is delay of a busy host, not
    of the link.
    """
    if not trips:
        return {}
    rtt = statistics.median(trips) if requested.jitter else min(trips)
    return {"rtt": rtt, "jitter": statistics.pstdev(trips)}


def _fastest(
    measured: Callable[[str, int, float], float], host: str, rate: int, timeout: float
) -> float:
    best = 0.0
    for _ in range(_MAX_TRAINS):
        best = max(best, measured(host, rate, timeout))
        if best > _SUFFICIENT_RATE_SHARE * rate:
            break
    return best


def _await(host: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, probe_server.PORT), 1.0).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return
