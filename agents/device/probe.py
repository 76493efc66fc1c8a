"""What a device's link gives, measured through it before the run clock starts."""

from __future__ import annotations

import statistics
import time

from agents import speedtest
from agents.config import Link

_FEWEST, _MOST = 5, 25
"""Round trips."""
_SECONDS = 2.0
"""For them."""
_TRANSFERS = 2
"""Of which the faster one counts: a busy host makes them slower, and nothing makes them faster."""
_PATIENCE = 30.0
"""Seconds until the router must answer."""


def measure(asked: Link, host: str, port: int) -> dict[str, float]:
    """`rtt` in seconds; `up` and `down` in bit/s of TCP payload where rates are asked. Raises OSError.

    Of some round trips the typical one under jitter, else the shortest: what is above that is the wait
    of a busy host for its processes, not the link's.
    """
    _await(host, port)
    trips = [speedtest.round_trip(host, port) for _ in range(_count(asked.rtt))]
    found = {"rtt": statistics.median(trips) if asked.jitter else min(trips)}
    if asked.up is not None:
        found["up"] = max(speedtest.upload(host, asked.up) for _ in range(_TRANSFERS))
    if asked.down is not None:
        found["down"] = max(speedtest.download(host, asked.down) for _ in range(_TRANSFERS))
    return found


def _count(rtt: float) -> int:
    return _MOST if rtt == 0 else min(max(_FEWEST, int(_SECONDS / rtt)), _MOST)


def _await(host: str, port: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            speedtest.round_trip(host, port)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return
